"""CUDA graphs that vLLM would capture with our arguments, from its own list: no GPU is needed to write it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.drafters.pool import HostedPool
from outrider_runtime.local_manifest import load_local_service
from outrider_runtime.paths import Paths
from outrider_runtime.vllm_plugin import arguments
from outrider_runtime.vllm_plugin.graphs import LARGEST_TOKENS, graph_sizes, offer_whole_graphs
from outrider_runtime.vllm_plugin.launch import LaunchPlan

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
EXAMPLE = Path(__file__).parents[2] / "examples/llama-h200.yaml"
REQUESTS, DRAFTED = 128, 5  # as the example has them
STOCK_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_TOKENS + 1, 16)]
"""What vLLM 0.32 chooses by itself for that service, without those that it adds for speculation."""
MODES = [False, True]
NAMED = ["uniform", "varlen"]
Table = list[list[int]]
SOME: Table = [[1, 1, 1]]
"""A table of lengths, for tests in which only its presence counts."""


def launch_plan() -> LaunchPlan:
    """Launch plan of the example, with a second head."""
    service = load_local_service(EXAMPLE)
    head = next(drafter for drafter in service.boot.draft_pool if drafter.eagle is not None)
    pool = HostedPool(hosted=(*service.boot.draft_pool, head.model_copy(update={"name": "second"})))
    return LaunchPlan(
        boot=service.boot, hot=service.hot, paths=Paths(run_dir="/run"), pool=pool, engine_version="0.32.0"
    )


def given_to_vllm() -> tuple[list[int], Table]:
    """Sizes and the table of lengths, as the engine's arguments for the example name them."""
    made = arguments.engine_arguments(launch_plan())
    assert f"--max-num-seqs={REQUESTS}" in made
    after = made[made.index("--cudagraph-capture-sizes") + 1 :]
    sizes = [
        int(argument)
        for argument in after[: next(place for place, argument in enumerate(after) if argument.startswith("--"))]
    ]
    speculative = json.loads(
        next(argument for argument in made if argument.startswith("--speculative-config")).partition("=")[2]
    )
    assert speculative["num_speculative_tokens"] == DRAFTED
    table: Table = speculative["num_speculative_tokens_per_batch_size"]
    return sizes, table


def of_member(number: int) -> Table:
    """The table of lengths in the config that one drafter of the pool is built from."""
    plan = launch_plan()
    config: Any = arguments.member_config(plan.pool.hosted[number], plan)
    table: Table = config["num_speculative_tokens_per_batch_size"]
    return table


def captured(sizes: list[int], drafted: int, requests: int, table: Table | None, **shape: Any) -> Any:
    """vLLM's manager of the target's graphs, or of a head's."""
    import outrider_cpu

    outrider_cpu.install()
    from outrider_runtime.vllm_plugin.graph_lengths import capture_every_length
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    capture_every_length()
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
        kind, varlen = shape.get("kind", cudagraph_utils.CudaGraphManager), shape.get("varlen", False)
        return kind(config, torch.device("cpu"), mode, query, varlen_decode=varlen)


def captures(sizes: list[int], table: Table | None, *, varlen: bool = False) -> int:
    """Graphs of the target, of a head's first pass, and of its others: one for each number of them."""
    target = captured(sizes, DRAFTED, REQUESTS, table, varlen=varlen)
    if table is not None:
        offer_whole_graphs(target)
    others = captured(sizes, DRAFTED, REQUESTS, table, mode="FULL_DECODE_ONLY", query=1)
    passes = 1 if table is None else DRAFTED - 1
    return 2 * _number(target) + passes * _number(others)


def _number(manager: Any) -> int:
    return sum(len(graphs) for graphs in manager._capture_descs.values())


@pytest.mark.parametrize("varlen", MODES, ids=NAMED)
def test_pod_captures_at_most_1_5_times_the_graphs_of_vllm(varlen: bool) -> None:
    """Bug: every length at every size of a fine grid took minutes of a pod's start and gigabytes of its memory."""
    assert captures(*given_to_vllm(), varlen=varlen) <= 1.5 * captures(STOCK_SIZES, None)


def test_graph_sizes_fit_the_examples_requests() -> None:
    assert given_to_vllm()[0] == graph_sizes(DRAFTED, REQUESTS)


@settings(max_examples=25)
@given(drafted=st.integers(1, 8), requests=st.integers(1, 300))
def test_every_batch_has_a_whole_graph_at_every_length(drafted: int, requests: int) -> None:
    """Promise: no choice of the controller leaves the graphs, as far as graphs reach at all; and padding is bounded.
    Bug: with fewer requests than lengths, the larger lengths had none."""
    manager = captured(graph_sizes(drafted, requests), drafted, requests, SOME)
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


def test_uniform_steps_use_one_graph_and_varlen_steps_pieces() -> None:
    """What the state calls Uniform, and what the two prices of a step are for."""
    from outrider_runtime.vllm_plugin.graph_lengths import verification

    sizes, table = given_to_vllm()
    manager = captured(sizes, DRAFTED, REQUESTS, table)
    offer_whole_graphs(manager)
    assert verification(manager) == "Uniform"
    for length in range(1, DRAFTED + 2):
        batches = range(1, min(REQUESTS, LARGEST_TOKENS // length) + 1)
        assert {decoding(manager, [length] * batch) for batch in batches} == {"FULL"}
    assert decoding(manager, [3, 1, 6]) == "PIECEWISE"


lengths_of_requests = st.lists(st.integers(1, DRAFTED + 1), min_size=1, max_size=REQUESTS)


@settings(max_examples=200)
@given(lengths_of_requests)
def test_varlen_attention_replays_one_graph_for_any_lengths(lengths: list[int]) -> None:
    """Bug: on GPUs the price of a length of one's own for each request was a step in pieces (FlashAttention 3 and
    Triton replay graphs of any lengths). The padding is bounded."""
    from outrider_runtime.vllm_plugin.graph_lengths import verification

    manager, _ = both_managers(True)
    assert verification(manager) == "Varlen"
    if sum(lengths) <= LARGEST_TOKENS and max(lengths) > 1:
        assert decoding(manager, lengths) == "FULL"
        graph = manager.dispatch(len(lengths), sum(lengths), None, 0, max_query_len=max(lengths))
        assert (graph.uniform_token_count, graph.max_query_len) == (None, DRAFTED + 1)
        assert graph.num_tokens <= sum(lengths) * 4 / 3 + 4
    assert manager.dispatch(len(lengths), sum(lengths), None, 0).cg_mode.name != "FULL", "with a prompt in the step"


@pytest.mark.parametrize("varlen", MODES, ids=NAMED)
def test_step_without_proposals_uses_plain_decodings_graph(varlen: bool) -> None:
    """Promise: k = 0 costs what plain decoding costs. Kernels for one token a request are chosen at the capture."""
    target, _ = both_managers(varlen)
    for batch in range(1, REQUESTS + 1):
        graph = target.dispatch(batch, batch, 1, 0, max_query_len=1)
        assert (graph.cg_mode.name, graph.uniform_token_count, graph.max_query_len) == ("FULL", 1, None)


def test_heads_later_passes_have_one_graph_per_draft_length() -> None:
    """One graph for each number of passes, if vLLM records all passes in one (FlashAttention, Triton).

    Bug: a second head had graphs of all passes only, so that it ran all of them for any length."""
    sizes, _ = given_to_vllm()
    for number in (-1, -2):
        from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

        made = captured(
            sizes, DRAFTED, REQUESTS, of_member(number), mode="FULL_DECODE_ONLY", query=1,
            kind=SpeculatorCudaGraphManager,
        )  # fmt: skip
        with mock.patch.object(SpeculatorCudaGraphManager.__base__, "capture"):
            made.capture(*[None] * 6, specialize_spec_tokens=True)
        made.graphs = {graph: None for graphs in made._capture_descs.values() for graph in graphs}
        made._graphs_captured = True
        for passes in range(2, DRAFTED + 1):
            graph = made.specialize_spec_tokens(made.dispatch(8, 8, 1, 0), passes)
            assert (graph.cg_mode.name, graph.num_speculative_tokens) == ("FULL", passes)


def test_block_draft_has_one_graph_of_its_whole_block_a_size() -> None:
    """Promise: few graphs, and each step finds one. With a table of lengths vLLM would capture one for every length."""
    import outrider_cpu

    outrider_cpu.install()
    from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

    sizes, width = given_to_vllm()[0], DRAFTED + 1
    made = captured(
        sizes, DRAFTED, REQUESTS, None, mode="FULL_DECODE_ONLY", query=width, kind=DFlashCudaGraphManager
    )  # fmt: skip
    graphs = next(iter(made._capture_descs.values()))
    assert {graph.uniform_token_count for graph in graphs} == {width}
    assert len(graphs) <= len(sizes)
    made._graphs_captured = True
    for batch in range(1, min(REQUESTS, LARGEST_TOKENS // width) + 1):
        assert made.dispatch(batch, batch * width, width, 0).cg_mode.name == "FULL"


@pytest.mark.parametrize("second", [False, True], ids=["primary", "second"])
@pytest.mark.parametrize("varlen", MODES, ids=NAMED)
@settings(max_examples=100)
@given(lengths=lengths_of_requests, reads_a_prompt=st.booleans())
def test_heads_first_pass_uses_the_graph_of_the_batch_size(
    varlen: bool, second: bool, lengths: list[int], reads_a_prompt: bool
) -> None:
    """It reads the metadata that the target's attention prepared, and some kernels lay that out by the graph's number
    of requests."""
    target, head = both_managers(varlen, second=second)
    longest = None if reads_a_prompt else max(lengths)
    same = lengths[0] if len(set(lengths)) == 1 and not reads_a_prompt else None
    of_target = target.dispatch(len(lengths), sum(lengths), same, 0, max_query_len=longest)
    head.longest = longest
    of_head = head.dispatch(len(lengths), of_target.num_tokens, same, num_active_loras=0, max_query_len=None)
    assert of_head.cg_mode == of_target.cg_mode
    if of_target.cg_mode.name == "FULL":
        assert of_head == of_target


@cache
def both_managers(varlen: bool, *, second: bool = False) -> tuple[Any, Any]:
    """Managers of the target's graphs and of a head's, which do not change as they dispatch. second: of the pool's
    second head, whose config is not the engine's."""
    sizes, table = given_to_vllm()
    target = captured(sizes, DRAFTED, REQUESTS, table, varlen=varlen)
    from outrider_runtime.vllm_plugin.eagle_head import FirstPassGraphs

    head = captured(sizes, DRAFTED, REQUESTS, of_member(-1) if second else table, varlen=varlen, kind=FirstPassGraphs)
    for manager in (target, head):
        offer_whole_graphs(manager)
        manager._graphs_captured = True
    return target, head


def attention(support: str, longest: int | None = None) -> Any:
    """A group of layers whose backend's graphs replay as much."""
    from vllm.v1.attention.backend import AttentionCGSupport

    builder = SimpleNamespace(
        get_cudagraph_support=lambda *_: AttentionCGSupport[support],
        get_varlen_cudagraph_max_query_len=lambda *_: longest,
    )
    return SimpleNamespace(
        get_metadata_builder=lambda _: builder, kv_cache_spec=None, backend=int, layer_names=["a layer"]
    )


@pytest.mark.parametrize(
    ("groups", "beyond", "fits"),
    [
        ([("ALWAYS",)], "ALWAYS", True),
        ([("ALWAYS",), ("UNIFORM_BATCH", DRAFTED + 1)], "ALWAYS", True),
        ([("ALWAYS",), ("UNIFORM_BATCH", DRAFTED)], "ALWAYS", False),
        ([("ALWAYS",), ("UNIFORM_BATCH", None)], "ALWAYS", False),
        ([("NEVER",)], "ALWAYS", False),
        ([("ALWAYS",)], "UNIFORM_BATCH", False),
    ],
)
def test_verification_mode_follows_the_attention_backend(groups: list[Any], beyond: str, fits: bool) -> None:
    """FlashAttention 3 and Triton always can, FlashAttention 2 cannot; vLLM's own backends say so."""
    import outrider_cpu

    outrider_cpu.install()
    from outrider_runtime.vllm_plugin.runner import PoolRunner
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu import cudagraph_utils

    graphs_of: Any = PoolRunner._graphs
    runner = SimpleNamespace(
        attn_groups=[[attention(*group) for group in groups]], vllm_config=None, decode_query_len=DRAFTED + 1,
        model_state=SimpleNamespace(get_additional_cg_support=lambda: (AttentionCGSupport[beyond], "another")),
        speculator=SimpleNamespace(any_length_fits=None),
    )  # fmt: skip
    with mock.patch.object(cudagraph_utils, "ModelCudaGraphManager", lambda *_, **keywords: keywords):
        assert graphs_of(runner, varlen_decode=False) == {"varlen_decode": fits}
        assert runner.speculator.any_length_fits is fits
        plain = SimpleNamespace(speculator=None)
        assert graphs_of(plain, varlen_decode=False) == {"varlen_decode": False}, "as vLLM has it"


def test_attention_backends_report_their_graph_support() -> None:
    """Triton is one of those that replay any lengths; FlashAttention is where it is version 3, which no CPU has."""
    import outrider_cpu

    outrider_cpu.install()
    from outrider_runtime.vllm_plugin.graph_lengths import any_length_fits
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

    def fits(builder: type) -> bool:
        group = SimpleNamespace(get_metadata_builder=lambda _: builder, kv_cache_spec=None, backend=builder)
        model_state = SimpleNamespace(get_additional_cg_support=lambda: (AttentionCGSupport.ALWAYS, None))
        return any_length_fits(
            SimpleNamespace(attn_groups=[[group]], vllm_config=None, decode_query_len=6, model_state=model_state)
        )

    assert fits(TritonAttentionMetadataBuilder)
    assert not fits(FlashAttentionMetadataBuilder)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_lengths_are_alike_without_graphs_for_uniform_steps(mode: str) -> None:
    """CPUs, backends without whole graphs, and those whose whole graphs fit any batch."""
    from outrider_runtime.vllm_plugin.graph_lengths import verification

    manager = captured(graph_sizes(DRAFTED, REQUESTS), DRAFTED, REQUESTS, SOME, mode=mode)
    assert verification(manager) == "Varlen"
    if mode != "NONE":
        assert decoding(manager, [3, 1, 6]) == decoding(manager, [3, 3, 3]) == mode
