"""The baselines are fair: vLLM's table comes from our profile, and controlled acceptance is what it says."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.profile import DrafterProfile, ExecutionMode, StepCost, TargetProfile
from outrider_crds.runtime_config import BootConfig, HotConfig
from outrider_crds.spec import (
    Accelerator,
    Drafter,
    DraftMethod,
    DraftPrefill,
    Engine,
    HostPathSource,
    ModelRef,
    ModelSource,
    PromptLookup,
    SpeculationMode,
)
from outrider_runtime.vllm_plugin import launch
from outrider_runtime.vllm_plugin.arguments import engine_arguments
from outrider_runtime.vllm_plugin.pool import choose_pool

from tests.benchmarks.evidence.server import stock_arguments
from tests.benchmarks.evidence.synthetic import emitted
from tests.benchmarks.evidence.table import draft_length_table

TODAY = "2026-11-21T00:00:00Z"


def table(
    *, acceptance: float = 0.6, draft_pass_s: float = 1e-3, per_token_s: float = 1e-3
) -> list[tuple[int, int, int]]:
    target = TargetProfile(
        key="t", model="m", product="cpu", error_percent=1, measured_at=TODAY,
        costs={ExecutionMode.UNIFORM: StepCost(constant_s=10e-3, per_batched_token_s=per_token_s)},
    )  # fmt: skip
    drafter = DrafterProfile(
        key="d", name="eagle", autoregressive=True, error_percent=1, measured_at=TODAY,
        cost=StepCost(constant_s=draft_pass_s),
    )  # fmt: skip
    return draft_length_table(target, drafter, acceptance=acceptance, context_tokens=100, largest_batch=64, most=5)


def test_the_table_names_every_batch_size_once() -> None:
    sizes = [size for first, last, _ in table() for size in range(first, last + 1)]
    assert sizes == list(range(1, 65))


def test_the_table_speculates_when_alone_and_not_in_a_crowd() -> None:
    lengths = [length for *_, length in table()]
    assert lengths[0] >= 2
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]


def test_a_draft_that_is_never_right_is_not_used() -> None:
    assert table(acceptance=0.0) == [(1, 64, 0)]


@given(st.data())
def test_controlled_acceptance_keeps_a_prefix_and_adds_the_targets_token(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 6))
    drafts = data.draw(st.lists(st.integers(-1, 50), min_size=count, max_size=count))
    chances = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=count, max_size=count))
    targets = list(range(100, 101 + count))
    tokens = emitted(drafts, targets, chances, acceptance=0.5)
    kept = len(tokens) - 1
    assert tokens == [*drafts[:kept], targets[kept]]
    assert all(chance < 0.5 and draft >= 0 for chance, draft in zip(chances[:kept], drafts[:kept], strict=True))
    assert kept == count or chances[kept] >= 0.5 or drafts[kept] < 0


def test_stock_is_started_like_ours_less_what_makes_it_ours() -> None:
    model = ModelRef(name="m", source=ModelSource(host_path=HostPathSource(path="/models/m")))
    boot = BootConfig(
        service="s", namespace="n", revision="r", target=model, max_draft_tokens=3,
        draft_pool=[Drafter(name="lookup", method=DraftMethod.PROMPT_LOOKUP, prompt_lookup=PromptLookup())],
        accelerator=Accelerator(products=["cpu"]), engine=Engine(extra_args=["--max-num-seqs=64"]),
    )  # fmt: skip
    pool = choose_pool(boot, launch.Paths(mounted=False).models)
    hot = HotConfig(
        mode=SpeculationMode.CLOSED_LOOP, draft_prefill=DraftPrefill.AUTO, max_draft_tokens=3, slo_classes=[],
        default_slo_class=None,
    )  # fmt: skip
    plan = launch.LaunchPlan(boot=boot, hot=hot, paths=launch.Paths(mounted=False), pool=pool, engine_version="0.32.0")
    ours, stock = engine_arguments(plan), stock_arguments(plan, {"method": "ngram"})
    assert "--max-num-seqs=64" in stock
    assert json.loads(stock[-1].partition("=")[2]) == {"method": "ngram"}
    removed = {one.partition("=")[0] for one in ours if one not in stock} - {ours[0]}
    assert removed == {"--port", "--scheduler-cls", "--worker-cls", "--speculative-config"}
