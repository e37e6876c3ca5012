"""Where a target that drafts for itself over a window pays, as its profile says."""

from __future__ import annotations

import dataclasses

import pytest
from outrider_crds.long_contexts import BATCHES, SelfDraft
from outrider_crds.profile import StepCost

STEP = StepCost(
    per_context_token_s=1e-6, per_batched_token_s=2e-5, per_batched_token_above_knee_s=1e-4, knee_tokens=64,
    constant_s=0.01,
)  # fmt: skip
"""Reading 10,000 cached tokens takes as long as reading the weights; beyond 64 tokens arithmetic shows."""
SELF = SelfDraft(STEP, STEP, budget_tokens=512, most_tokens=4)


def test_a_pass_that_costs_a_step_never_pays_and_one_that_costs_little_does() -> None:
    assert SELF.speedup(256, 1) < 1.0
    assert SELF.speedup(100_000, 8) > 2.0


@pytest.mark.parametrize("batch", BATCHES)
def test_from_the_break_even_on_it_pays(batch: int) -> None:
    tokens = SELF.break_even_tokens(batch)
    assert tokens is not None
    assert SELF.speedup(0.9 * tokens, batch) < 1.0 < SELF.speedup(1.1 * tokens, batch)


def test_a_larger_batch_breaks_even_at_shorter_contexts_until_arithmetic_shows() -> None:
    found = [SELF.break_even_tokens(batch) or 0 for batch in (1, 4, 16)]
    assert found == sorted(found, reverse=True)


def test_beyond_the_inflection_a_larger_batch_gains_more() -> None:
    """MagicDec, section 3.3."""
    tokens = SELF.inflection_tokens()
    assert tokens is not None
    gains = [SELF.speedup(1.1 * tokens, batch) for batch in BATCHES]
    assert gains == sorted(gains)
    assert [SELF.speedup(0.5 * tokens, batch) for batch in BATCHES] != sorted(gains)


def test_where_the_context_costs_nothing_it_pays_at_none() -> None:
    step = STEP.model_copy(update={"per_context_token_s": 0.0})
    free = dataclasses.replace(SELF, target=step, draft=step)
    assert free.break_even_tokens(8) is None
    assert free.inflection_tokens() is None


@pytest.mark.parametrize("draft", [STEP, StepCost(constant_s=1.0)], ids=["pays", "never pays"])
def test_where_it_pays_is_found_in_a_few_looks(draft: StepCost, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator judges up to 64 at each look at a service, and everybody else waits: all contexts in steps of 5%
    took it 1.2 seconds."""
    priced: list[float] = []
    price = StepCost.seconds

    def noting(cost: StepCost, context: float, batch: int, tokens: int) -> float:
        priced.append(context)
        return price(cost, context, batch, tokens)

    monkeypatch.setattr(StepCost, "seconds", noting)
    one = dataclasses.replace(SELF, draft=draft)
    for batch in BATCHES:
        one.break_even_tokens(batch)
    one.inflection_tokens()
    assert 0 < len(priced) < 250
