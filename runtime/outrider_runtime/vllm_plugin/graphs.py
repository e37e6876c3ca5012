"""The CUDA graphs that vLLM captures.

vLLM captures a graph for each given token count, at each verification length, for the target and for a head's first
pass. Each graph costs seconds at the start and device memory, so token counts grow by a third. A batch is padded by a
third at most, and by half of that on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

LARGEST_TOKENS = 512
"""vLLM's own limit; larger batches run without a graph."""


def graph_sizes(max_draft_tokens: int, max_requests: int) -> list[int]:
    """Return token counts, ascending. They include the largest batch that fits at each length.

    vLLM rounds a count up to whole requests, and drops the graph if there cannot be as many.
    """
    lengths = range(1, max_draft_tokens + 2)
    whole = {min(max_requests, LARGEST_TOKENS // length) * length for length in lengths}
    return sorted({size for size in _grid() if size <= max(whole)} | whole)


def offer_whole_graphs(manager: Any) -> None:
    """Let each step without prefill find a full CUDA graph. manager: vLLM's manager of a model's graphs.

    vLLM considers only graphs of the next token count, and rounds counts to whole requests at each length. The next
    count is often of another length. A third of all batches (three plain requests, seven with a proposal each) would
    run piecewise although a full graph fits.
    """
    _keep_plain_graphs(manager)
    whole = [graph for graphs in manager._capture_descs.values() for graph in graphs if graph.uniform_token_count]
    whole.sort(key=lambda graph: graph.num_tokens)
    for (tokens, loras), offered in manager._candidates.items():
        fitting = [graph for graph in whole if graph.num_tokens >= tokens and graph.num_active_loras == loras]
        manager._candidates[tokens, loras] = fitting + [graph for graph in offered if not graph.uniform_token_count]


def _keep_plain_graphs(manager: Any) -> None:
    """Keep graphs of one token per request together with graphs that take any lengths.

    Some kernels decode faster if that is known at capture. So a step without proposals costs as much as plain decoding.
    """
    for graphs in manager._capture_descs.values():
        any_length = [graph for graph in graphs if graph.max_query_len and graph.num_tokens <= manager.max_num_reqs]
        graphs += [
            replace(graph, num_reqs=graph.num_tokens, uniform_token_count=1, max_query_len=None) for graph in any_length
        ]
        graphs.sort(key=lambda graph: graph.num_tokens, reverse=True)  # captured so: the largest first


def _grid() -> Iterator[int]:
    size = 1
    while size <= LARGEST_TOKENS:
        yield size
        size = _multiple(4 * size // 3) if size >= 4 else 2 * size


def _multiple(size: int) -> int:
    """Round to a multiple that suits the tiles of a matrix multiplication: of four, then of eight."""
    return -(-size // 4) * 4 if size < 32 else size // 8 * 8
