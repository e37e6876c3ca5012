"""Which lengths of proposals the target verifies in one whole CUDA graph (worker process).

For steps without prompts vLLM captures graphs of one length for all requests, one for every length that its table
names; or, where the attention can replay them (FlashAttention 3, Triton), one graph a size for every mix of lengths.
vLLM makes those only for proposals that it trims on the device. They hold as well where the scheduler has trimmed them
before the step, so here they are made wherever they can be. A step that fits no whole graph runs in pieces, with
attention between them.
"""

from __future__ import annotations

from typing import Any

from outrider_crds.state import Verification
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend


def any_length_fits(runner: Any) -> bool:
    """Whether a whole graph can be replayed for requests of different lengths. runner: vLLM's, its attention known."""
    beyond_the_groups, _backend = runner.model_state.get_additional_cg_support()
    return (
        beyond_the_groups == AttentionCGSupport.ALWAYS
        and get_varlen_cudagraph_unsupported_backend(runner.attn_groups, runner.vllm_config, runner.decode_query_len)
        is None
    )


def verification(graphs: Any) -> Verification:
    """graphs: vLLM's manager of the target's graphs, its mode narrowed to what the attention backend supports."""
    mode = graphs.cudagraph_mode
    one_length = mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL and not graphs.varlen_decode
    return Verification.UNIFORM if one_length else Verification.VARLEN
