"""Greedy output with the plugin is that of plain decoding, token for token, whatever the loop does meanwhile.

Real vLLM, real SmolLM2, in this process. The reference is the engine without a draft pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from outrider_crds.spec import Drafter
from outrider_crds.state import DrafterState, RuntimeState
from outrider_runtime.control.batch import Batch, DraftPlan, Purpose, VerifyPlan
from outrider_runtime.vllm_plugin.messages import DraftOrder

from tests.engine.engines import POOR_DRAFT, Bench, bench, draft_model, eagle, lookup

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

STORY = "The old lighthouse keeper counted the waves: one, two, three, four, one, two, three, four. " * 8
PROMPTS = (
    "The capital of France is",
    "one two three four five six one two three four five six one two three",
    "def fib(n):\n    if n < 2:\n        return n\n    return",
    STORY + "Then he",
    "List the planets of the solar system: Mercury, Venus,",
    STORY + "After that she",
)
POOLS: dict[str, tuple[Drafter, ...]] = {
    "prompt lookup": (lookup(),),
    "EAGLE-3 and prompt lookup": (lookup(), eagle()),
    "draft model": (draft_model(POOR_DRAFT),),
}


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    with bench([]) as plain:
        return plain.generate(PROMPTS)


@pytest.fixture(scope="module", params=list(POOLS))
def running(request: pytest.FixtureRequest, reference: list[list[int]]) -> Iterator[Bench]:
    assert reference, "its engine is gone before this one starts"
    with bench(POOLS[request.param]) as started:
        yield started


@pytest.fixture
def engine(running: Bench) -> Bench:
    running.fresh()
    return running


def drafters(engine: Bench) -> list[str]:
    return [drafter.name for drafter in engine.plan.pool.hosted]


def test_each_drafter_at_each_length(engine: Bench, reference: list[list[int]]) -> None:
    for drafter in drafters(engine):
        for draft_tokens in (1, 3):
            engine.fresh()
            engine.loop.pin(draft_tokens, drafter)
            assert engine.generate(PROMPTS) == reference, f"{drafter} at {draft_tokens}"
            assert engine.verified(drafter) > 0
        assert engine.accepted(drafter) > 0, f"{drafter} never had a proposal accepted: the test proves nothing"


def test_the_length_changes_at_every_step(engine: Bench, reference: list[list[int]]) -> None:
    """Bug: stale proposals after a step without any; a batch whose requests verify different lengths."""
    for drafter in drafters(engine):
        lengths = itertools.cycle((0, 3, 1, 0, 0, 2, 3))
        tokens = engine.run(
            [(prompt, {}) for prompt in PROMPTS],
            arrive_every=2,
            before_step=lambda _step, name=drafter, cycle=lengths: engine.loop.pin(next(cycle), name),  # type: ignore[misc]
        )
        assert tokens == reference, drafter


def test_requests_come_and_go_and_share_prefixes(engine: Bench, reference: list[list[int]]) -> None:
    """Bug: rows of the batch move when a request leaves; a cached prefix without draft KV."""
    for drafter in drafters(engine):
        engine.loop.pin(3, drafter)
        tokens = engine.run([(prompt, {}) for prompt in PROMPTS], arrive_every=3, abort_at={9: "1"})
        assert [row for index, row in enumerate(tokens) if index != 1] == reference[:1] + reference[2:]


def test_the_closed_loop_by_itself(engine: Bench, reference: list[list[int]]) -> None:
    for _ in range(3):
        assert engine.generate(PROMPTS, arrive_every=2) == reference


def test_a_hole_in_the_drafts_cache_breaks_nothing(engine: Bench, reference: list[list[int]]) -> None:
    """Promise: steps without the draft leave holes. A draft model is not asked for requests with one, an EAGLE head
    is: its acceptance does not suffer (`holes_matter`). New requests are drafted for either way."""
    for drafter in drafters(engine):
        engine.fresh()
        tokens = engine.run(
            [(prompt, {}) for prompt in PROMPTS],
            arrive_every=4,
            before_step=lambda step, d=drafter: engine.loop.pin(0 if step < 10 else 3, d),  # type: ignore[misc]
        )
        assert tokens == reference
        asked = {one.id.split("-")[0] for step in engine.steps for one in step.requests if one.drafter == drafter}
        assert "5" in asked, "a request that came after the gate opened is drafted for"
        assert ("0" in asked) != (drafter == "draft")


def test_requests_of_one_batch_use_different_drafters(engine: Bench, reference: list[list[int]]) -> None:
    """Promise: the pool is chosen per request, none included."""
    choices = [*drafters(engine), None]
    passes = itertools.cycle([3, 1, 2])  # the neural draft has a length of its own

    def plan_draft(batch: Batch) -> tuple[DraftPlan, DraftOrder]:
        chosen = tuple(
            choices[(i + batch.requests[0].output_tokens) % len(choices)] if view.prefill_left == 0 else None
            for i, view in enumerate(batch.requests)
        )
        plan = DraftPlan(3, chosen, True, True, neural_tokens=next(passes), purpose=Purpose.FIXED)
        return plan, engine.loop.order(batch, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.loop, "plan_draft", plan_draft)
        patch.setattr(engine.loop, "plan_verify", AllProposed())
        assert engine.generate(PROMPTS) == reference
    for drafter in drafters(engine):
        assert engine.verified(drafter) > 0


class AllProposed:
    """Verifies whatever was proposed, as far as the request may still go."""

    def __call__(self, batch: Batch) -> VerifyPlan:
        return VerifyPlan(tuple(min(view.proposed, view.remaining_tokens - 1) for view in batch.requests))


def test_a_drafter_that_raises_is_suspended_and_requests_go_on(engine: Bench, reference: list[list[int]]) -> None:
    drafter = engine.plan.pool.hosted[-1]
    place = (engine.runner.drafter, "propose") if drafter.neural else (engine.runner._lookup, "propose")
    engine.loop.pin(2, drafter.name)

    def fail(*_arguments: object, **_keywords: object) -> None:
        raise RuntimeError("the draft fell over")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, fail)
        assert engine.generate(PROMPTS) == reference
    state = state_of(engine, drafter.name)
    assert "the draft fell over" in state.reason
    assert "suspended" in state.reason
    engine.loop.resume(drafter.name)


def test_tokens_outside_the_vocabulary_are_never_verified(engine: Bench, reference: list[list[int]]) -> None:
    """Bug: a token id of 2**30 indexes the target's embedding: the engine dies for everyone."""
    drafter = engine.plan.pool.hosted[-1]
    place = (engine.runner.drafter, "propose") if drafter.neural else (engine.runner._lookup, "propose")
    engine.loop.pin(2, drafter.name)
    propose = getattr(*place)

    def nonsense(*arguments: object, **keywords: object) -> object:
        proposals = propose(*arguments, **keywords)
        return [2**30 for _ in proposals] if isinstance(proposals, list) else proposals + 2**30

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, nonsense)
        assert engine.generate(PROMPTS) == reference
    assert "outside the vocabulary" in state_of(engine, drafter.name).reason
    assert engine.verified(drafter.name) == 0
    engine.loop.resume(drafter.name)


def state_of(engine: Bench, drafter: str) -> DrafterState:
    state: RuntimeState = engine.scheduler.outrider_reporter.state()
    return next(one for one in state.drafters if one.name == drafter)
