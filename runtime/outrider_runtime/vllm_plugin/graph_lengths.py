"""Which lengths of proposals the target verifies in one whole CUDA graph (worker process).

For steps without prompts vLLM captures graphs of one length for all requests, one for every length; or, where the
attention can replay them (FlashAttention 3, Triton), one graph a size for every mix of lengths. vLLM makes those only
for proposals that it trims on the device. They hold as well where the scheduler has trimmed them before the step, so
here they are made wherever they can be. A step that fits no whole graph runs in pieces, with attention between them.
"""

from __future__ import annotations

import functools
from typing import Any

from outrider_crds.state import Verification
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import cudagraph_utils as speculators_graphs


def capture_every_length() -> None:
    """vLLM captures the lengths that its table gives a batch of 1, 2, ... requests, as many as run at once: with few
    requests, few lengths. The loop may choose any. Harmless when done twice."""
    for module in (cudagraph_utils, speculators_graphs):
        names: Any = vars(module)
        names["build_dynamic_sd_schedule_lookup"] = _every_length


@functools.wraps(cudagraph_utils.build_dynamic_sd_schedule_lookup)
def _every_length(*_table: object, vllm_num_speculative_tokens: int, **_size: object) -> list[int]:
    return [0, *range(vllm_num_speculative_tokens + 1)]  # the first place is nobody's


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
