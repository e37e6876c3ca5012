"""Passes of draft models and of sparse self-drafts: which CUDA graphs they are captured in, and that a pass which is
replayed over padded rows proposes what it proposes otherwise. No GPU is needed to write vLLM's list of graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from outrider_runtime.vllm_plugin.graphs import graph_sizes
from outrider_runtime.vllm_plugin.messages import DraftOrder

from tests.engine.engines import POOR_DRAFT, SMALL, draft_model, sparse_self
from tests.engine.ordered import OrderedBench, ordered
from tests.engine.test_graphs import DRAFTED, REQUESTS, captured

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
POOL = (draft_model(POOR_DRAFT), draft_model(POOR_DRAFT, "short", window_tokens=32), sparse_self(64))
MOST = 3
LONG = "The old lighthouse keeper counted the waves: one, two, three, four, one, two. " * 12 + "Then he"
PROMPTS = (LONG, "The capital of France is", "one two three four five six one two three four five six one two three")
READ_ON_DEVICE = ("block_table", "seq_lens", "query_start_loc")
"""Fields of the attention's metadata that its kernels read."""
PADDED = 4
"""Rows of the smallest graph that the tests pretend to have, more than they have requests."""


def made(support: str, lora: object = None) -> Any:
    """A draft's passes as `init_cudagraph_manager` leaves them, for the example's service."""
    sizes = graph_sizes(DRAFTED, REQUESTS)
    config = captured(sizes, DRAFTED, REQUESTS, None, mode="FULL_DECODE_ONLY", query=1).vllm_config
    config.lora_config = lora
    config.parallel_config = SimpleNamespace(
        tensor_parallel_size=1, decode_context_parallel_size=1, data_parallel_size=1
    )
    from outrider_runtime.vllm_plugin.decode_passes import DecodePasses
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu import cudagraph_utils

    passes = DecodePasses()
    passes.vllm_config, passes.device = config, torch.device("cpu")
    passes.attn_cg_support = SimpleNamespace(min_cg_support=AttentionCGSupport[support])
    known: dict[str, Any] = {
        "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
        "current_platform": SimpleNamespace(get_global_graph_pool=lambda: None),
        "is_breakable_cudagraph_enabled": lambda: False,
    }
    with mock.patch.multiple(cudagraph_utils, **known):
        passes.init_cudagraph_manager(CUDAGraphMode.FULL_AND_PIECEWISE)
    return passes._graphs


def test_passes_have_one_graph_a_batch_size() -> None:
    """Bug: none was captured, and a pass over a few tokens took four times as long as a step of its target."""
    graphs = made("UNIFORM_BATCH")
    sizes = [size for size in graph_sizes(DRAFTED, REQUESTS) if size <= REQUESTS]
    captured_sizes = [graph.num_tokens for mode in graphs._capture_descs.values() for graph in mode]
    assert sorted(captured_sizes) == sizes
    assert {graph.cg_mode.name for mode in graphs._capture_descs.values() for graph in mode} == {"FULL"}
    graphs._graphs_captured = True
    for rows in range(1, REQUESTS + 1):
        graph = graphs.dispatch(rows, rows, uniform_token_count=1, num_active_loras=0)
        assert graph.num_reqs == min(size for size in sizes if size >= rows)


@pytest.mark.parametrize(("support", "lora"), [("NEVER", None), ("UNIFORM_BATCH", object())])
def test_passes_without_graph_support_capture_none(support: str, lora: object) -> None:
    """Attention that cannot be captured; and adapters, which the host chooses for each request."""
    graphs = made(support, lora)
    assert not graphs.needs_capture()
    assert graphs.dispatch(3, 3, uniform_token_count=1, num_active_loras=0).cg_mode.name == "NONE"


@pytest.fixture(scope="module")
def engine() -> Iterator[OrderedBench]:
    with ordered(POOL, target=SMALL) as started:
        yield started


def in_turn(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
    order.passes[:] = [1 + (step + member) % MOST for member in range(len(POOL))]
    order.chosen[:] = [(step + place) % len(POOL) for place in range(len(requests))]
    return order._replace(draft_tokens=MOST)


def addresses(metadata: Any, by_layer: Any) -> dict[str, tuple[Any, ...]]:
    """Place and layout of the tables, lengths and slots that a pass reads, by layer and field."""
    read = {f"{layer}.{name}": value for layer, made in metadata.items() for name, value in vars(made).items()}
    tensors = {name: value for name, value in read.items() if name.rpartition(".")[2] in READ_ON_DEVICE}
    tensors |= {f"{layer}.slots": slots for layer, slots in by_layer.items()}
    return {name: (tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in tensors.items()}


class Replayed:
    """Stands for vLLM's manager, with a graph of four rows: runs what a graph would hold, over its padded rows, where
    the metadata points to what the graph was captured with."""

    def __init__(self, member: Any) -> None:
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        self.replays = 0
        self._member, self._built = member, member._pass_metadata
        self._graph = BatchExecutionDescriptor(
            CUDAGraphMode.FULL, num_tokens=PADDED, num_reqs=PADDED, uniform_token_count=1
        )
        self._captured = self._capture()
        member._pass_metadata = self._prepare

    def _capture(self) -> dict[str, tuple[Any, ...]]:
        """Addresses that a graph would hold."""
        captured = list[Any]()
        with (
            torch.inference_mode(),
            mock.patch.object(self._member, "_pass", lambda _rows, *read: captured.append(addresses(*read))),
        ):
            self._member._to_capture(self._graph, warmup=False)(self._graph.cg_mode)
        made: dict[str, tuple[Any, ...]] = captured[0]
        return made

    def dispatch(self, rows: int, *_arguments: Any, **_keywords: Any) -> Any:
        assert rows <= PADDED
        return self._graph

    def _prepare(self, rows: int, graph: Any, most_seen: Any, step: int, slot_mappings: Any) -> Any:
        self._slot_mappings = slot_mappings
        self._metadata = self._built(rows, graph, most_seen, step, slot_mappings)
        return self._metadata

    def run_fullgraph(self, graph: Any) -> None:
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        self.replays += 1
        by_layer = build_slot_mappings_by_layer(self._slot_mappings, self._member.kv_cache_config)
        assert addresses(self._metadata, by_layer) == self._captured
        self._member._pass(graph.num_reqs, self._metadata, by_layer)


def test_padded_passes_propose_the_same(engine: OrderedBench) -> None:
    """And each reads the tensors that a graph was captured with, windows included."""
    reference = engine.run(PROMPTS, in_turn, arrive_every=2)
    proposals = dict(engine.scheduler.proposals)
    assert {member for member, _, _ in proposals} == {0, 1, 2}
    members = [engine.member(number) for number in range(len(POOL))]
    graphs = [member._graphs for member in members]
    replayed = [Replayed(member) for member in members]
    try:
        for member, stand_in in zip(members, replayed, strict=True):
            member._graphs = stand_in
        assert engine.run(PROMPTS, in_turn, arrive_every=2) == reference
        assert dict(engine.scheduler.proposals) == proposals
        assert all(stand_in.replays > 0 for stand_in in replayed)
        assert all(not report.failures for _, report in engine.orders_and_reports)
    finally:
        for member, own in zip(members, graphs, strict=True):
            member._graphs = own
            del member._pass_metadata
