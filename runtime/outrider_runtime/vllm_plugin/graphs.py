"""Which CUDA graphs vLLM captures for us.

vLLM captures a graph for each token count that it is given, at each verification length, for the target and for a
head's first pass. Every one costs seconds at the start and device memory, so token counts lie a third apart: a batch is
padded by so much at most, by half as much on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

LARGEST_TOKENS = 512
"""vLLM's own limit; larger batches run without a graph."""


def graph_sizes(max_draft_tokens: int, max_requests: int) -> list[int]:
    """Token counts, ascending. The largest batch that fits is among them at every length: vLLM rounds a count up to
    whole requests, and drops the graph when these are more than there can be or than fit."""
    lengths = range(1, max_draft_tokens + 2)
    whole = {min(max_requests, LARGEST_TOKENS // length) * length for length in lengths}
    return sorted({size for size in _grid() if size <= max(whole)} | whole)


def offer_whole_graphs(manager: Any) -> None:
    """Let each step without prompts find its whole graph. manager: vLLM's, of a model's graphs.

    vLLM offers a step the graphs of the next token count alone, and rounds counts to whole requests at each length.
    What comes next is often of another length: a third of all batches (three plain requests, seven with a proposal
    each) would run in pieces beside a whole graph that fits.
    """
    _keep_plain_graphs(manager)
    whole = [graph for graphs in manager._capture_descs.values() for graph in graphs if graph.uniform_token_count]
    whole.sort(key=lambda graph: graph.num_tokens)
    for (tokens, loras), offered in manager._candidates.items():
        fitting = [graph for graph in whole if graph.num_tokens >= tokens and graph.num_active_loras == loras]
        manager._candidates[tokens, loras] = fitting + [graph for graph in offered if not graph.uniform_token_count]


def _keep_plain_graphs(manager: Any) -> None:
    """Beside graphs that take any lengths, those of one token a request: some kernels decode faster where they know
    that when they are captured, and a step without proposals costs what plain decoding costs."""
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
    """Rounded to what tiles of a matrix multiplication like: fours, then eights."""
    return -(-size // 4) * 4 if size < 32 else size // 8 * 8
