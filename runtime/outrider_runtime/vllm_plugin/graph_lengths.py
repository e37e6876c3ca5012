"""Verification lengths that the target runs in one full CUDA graph (worker process).

For steps without prefill vLLM captures uniform graphs: one for each length, which all requests share. If the attention
can replay them (FlashAttention 3, Triton), it captures varlen graphs: one for each size, for any mix of lengths. vLLM
makes varlen graphs only if it trims proposals on the device. They are valid as well if the scheduler trims proposals
before the step, so here they are made wherever possible. A step that fits no full graph runs piecewise, with attention
between the pieces.
"""

from __future__ import annotations

import functools
from typing import Any

from outrider_crds.runtime_state import Verification
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

from outrider_runtime.vllm_plugin import patches


def capture_every_length() -> None:
    """Have vLLM capture graphs of every length. Idempotent.

    vLLM itself captures the lengths that its table has for batches of 1, 2, ... requests: few lengths for few requests.
    """
    for patch in patches.GRAPH_LENGTHS:
        patches.put(patch, _every_length)


@functools.wraps(cudagraph_utils.build_dynamic_sd_schedule_lookup)
def _every_length(*_table: object, vllm_num_speculative_tokens: int, **_size: object) -> list[int]:
    return [0, *range(vllm_num_speculative_tokens + 1)]  # vLLM ignores the first entry


def any_length_fits(runner: Any) -> bool:
    """Return whether a full CUDA graph can be replayed for requests of different lengths.

    runner: vLLM's, after its attention backend is chosen.
    """
    beyond_the_groups, _backend = runner.model_state.get_additional_cg_support()
    return (
        beyond_the_groups == AttentionCGSupport.ALWAYS
        and get_varlen_cudagraph_unsupported_backend(runner.attn_groups, runner.vllm_config, runner.decode_query_len)
        is None
    )


def verification(graphs: Any) -> Verification:
    """Return the kind of steps that the target's graphs take.

    graphs: vLLM's manager, with its mode narrowed to what the attention backend supports.
    """
    mode = graphs.cudagraph_mode
    one_length = mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL and not graphs.varlen_decode
    return Verification.UNIFORM if one_length else Verification.VARLEN
