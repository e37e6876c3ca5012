"""From the controller's plan to the arrays that the worker gets."""

from __future__ import annotations

from outrider_runtime.control.batch import Batch, DraftPlan, Purpose, RequestView
from outrider_runtime.vllm_plugin.launch import LaunchPlan, Paths
from outrider_runtime.vllm_plugin.loop import ControlLoop
from outrider_runtime.vllm_plugin.messages import IDLE, NOBODY
from outrider_runtime.vllm_plugin.pool import Pool

from tests.engine.engines import boot_config, eagle, hot_config, lookup

POOL = (lookup(), eagle())


def loop(**left_out: str) -> ControlLoop:
    plan = LaunchPlan(
        boot=boot_config(POOL), hot=hot_config(), paths=Paths(run_dir="/run"), pool=Pool(hosted=POOL),
        engine_version="0.32.0",
    )  # fmt: skip
    return ControlLoop(plan, largest_graph_tokens=None, left_out=left_out)


def batch(*ready: bool) -> Batch:
    views = [RequestView(str(n), None, 50, 0, 0, 5, 20, 0.5, draft_ready=one) for n, one in enumerate(ready)]
    return Batch(tuple(views), 0.0, 512, 4096)


def test_the_head_is_second_where_a_lookup_is_first() -> None:
    """Not where nobody is asked, nor where the draft's KV has a hole; and the first choice stays what it was."""
    plan = DraftPlan(3, ("pld", "eagle", None, "pld"), True, True, neural_tokens=2, purpose=Purpose.FIXED)
    order = loop().order(batch(True, True, True, False), plan)
    assert order.chosen.tolist() == [0, 1, NOBODY, 0]
    assert order.second.tolist() == [1, NOBODY, NOBODY, NOBODY]
    assert order.passes.tolist() == [3, 2]


def test_a_head_may_run_without_proposing_and_a_lookup_never_does() -> None:
    """Its first pass keeps its KV whole."""
    order = loop().order(batch(True), DraftPlan(0, (None,), True, True))
    assert order.passes.tolist() == [IDLE, 0]
    assert order.chosen.tolist() == [NOBODY]
    assert not loop().order(batch(True), DraftPlan(0, (None,), False, False)).drafts


def test_a_drafter_that_the_worker_left_out_keeps_its_number_and_gets_no_orders() -> None:
    found = loop(eagle="it cannot be loaded")
    assert found.dropped == {"eagle": "it cannot be loaded"}
    order = found.order(batch(True), DraftPlan(3, ("pld",), False, False))
    assert order.passes.tolist() == [3, IDLE]
