"""Which lengths of proposals the target verifies in one whole CUDA graph (worker process).

vLLM captures, for steps without prompts, graphs of one length for all requests: one for every length that its table
names. Graphs of another length for each request (`varlen_decode`) it captures only where it trims proposals on the
device; here the scheduler has trimmed them before the step. A step that fits no whole graph runs in pieces, with
attention between them.
"""

from __future__ import annotations

from typing import Any

from outrider_crds.state import Verification
from vllm.config.compilation import CUDAGraphMode


def verification(graphs: Any) -> Verification:
    """graphs: vLLM's manager of the target's graphs, its mode narrowed to what the attention backend supports."""
    mode = graphs.cudagraph_mode
    one_length = mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL and not graphs.varlen_decode
    return Verification.UNIFORM if one_length else Verification.VARLEN
