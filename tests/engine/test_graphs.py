"""CUDA graphs that vLLM would capture with our arguments, from its own list: no GPU is needed to write it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.vllm_plugin.graphs import LARGEST_TOKENS, graph_sizes, offer_whole_graphs

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
REQUESTS, DRAFTED = 128, 5  # of examples/llama-h200.yaml
STOCK_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_TOKENS + 1, 16)]
"""What vLLM 0.32 chooses by itself for that service."""


def every_length(most: int) -> list[list[int]]:
    return [[length + 1, length + 1, length] for length in range(most + 1)]


def captured(sizes: list[int], drafted: int, requests: int, table: list[list[int]] | None, **shape: Any) -> Any:
    """vLLM's manager of the target's graphs, or of a head's."""
    from outrider_runtime.vllm_plugin import cpu

    cpu.install()
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    speculative = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: table is not None, num_speculative_tokens_per_batch_size=table
    )
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=speculative,
        num_speculative_tokens=drafted,
    )
    known: dict[str, Any] = {
        "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
        "current_platform": SimpleNamespace(get_global_graph_pool=lambda: None),
        "is_breakable_cudagraph_enabled": lambda: False,
    }
    mode, query = CUDAGraphMode[shape.get("mode", "FULL_AND_PIECEWISE")], shape.get("query", drafted + 1)
    with mock.patch.multiple(cudagraph_utils, **known):
        return cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, query)


def captures(sizes: list[int], table: list[list[int]] | None) -> int:
    """Graphs of the target, of a head's first pass, and of its others: one for each number of them."""
    target = captured(sizes, DRAFTED, REQUESTS, table)
    others = captured(sizes, DRAFTED, REQUESTS, table, mode="FULL_DECODE_ONLY", query=1)
    passes = 1 if table is None else DRAFTED - 1
    return 2 * _number(target) + passes * _number(others)


def _number(manager: Any) -> int:
    return sum(len(graphs) for graphs in manager._capture_descs.values())


def test_a_pod_captures_at_most_half_as_many_graphs_again_as_stock_vllm() -> None:
    """Bug: every length at every size of a fine grid took minutes of a pod's start and gigabytes of its memory."""
    assert captures(graph_sizes(DRAFTED, REQUESTS), every_length(DRAFTED)) <= 1.5 * captures(STOCK_SIZES, None)


@settings(max_examples=25)
@given(
    drafted=st.integers(1, 8), requests=st.integers(9, 300)
)  # the table names a length for each of the first batch sizes
def test_every_batch_has_a_whole_graph_at_every_length(drafted: int, requests: int) -> None:
    """Promise: no choice of the controller leaves the graphs, as far as graphs reach at all; and padding is bounded."""
    manager = captured(graph_sizes(drafted, requests), drafted, requests, every_length(drafted))
    full = [graph for graph in next(iter(manager._capture_descs.values())) if graph.uniform_token_count]
    for length in range(1, drafted + 2):
        rows = sorted(graph.num_reqs for graph in full if graph.uniform_token_count == length)
        for batch in range(1, min(requests, LARGEST_TOKENS // length) + 1):
            fitting = [row for row in rows if row >= batch]
            assert fitting, f"{batch} requests of {length} tokens"
            assert fitting[0] <= batch * 4 / 3 + 8 / length + 1


def decoding(manager: Any, lengths: list[int]) -> Any:
    """The graph that a step without prompts runs in."""
    manager._graphs_captured = True
    same = lengths[0] if len(set(lengths)) == 1 else None
    return manager.dispatch(len(lengths), sum(lengths), same, 0, max_query_len=max(lengths)).cg_mode.name


def test_equal_lengths_run_in_a_whole_graph_and_others_in_pieces() -> None:
    """What the state calls Uniform, and what the two prices of a step are for."""
    from outrider_runtime.vllm_plugin.verification import verification

    manager = captured(graph_sizes(DRAFTED, REQUESTS), DRAFTED, REQUESTS, every_length(DRAFTED))
    offer_whole_graphs(manager)
    assert verification(manager) == "Uniform"
    for length in range(1, DRAFTED + 2):
        batches = range(1, min(REQUESTS, LARGEST_TOKENS // length) + 1)
        assert {decoding(manager, [length] * batch) for batch in batches} == {"FULL"}
    assert decoding(manager, [3, 1, 6]) == "PIECEWISE"


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_where_no_graph_is_made_for_one_length_all_lengths_are_alike(mode: str) -> None:
    """CPUs, backends without whole graphs, and those whose whole graphs fit any batch."""
    from outrider_runtime.vllm_plugin.verification import verification

    manager = captured(graph_sizes(DRAFTED, REQUESTS), DRAFTED, REQUESTS, every_length(DRAFTED), mode=mode)
    assert verification(manager) == "Varlen"
    if mode != "NONE":
        assert decoding(manager, [3, 1, 6]) == decoding(manager, [3, 3, 3]) == mode
