"""Contexts from which self-drafting over a window pays, according to a profile."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.long_contexts import BATCHES, SelfDraft
from outrider_crds.profile import ProfileStepCost

STEP = ProfileStepCost(
    per_context_token_s=1e-6, per_batched_token_s=2e-5, per_batched_token_above_knee_s=1e-4, knee_tokens=64,
    constant_s=0.01,
)  # fmt: skip
"""Reading 10,000 cached tokens takes as long as reading the weights; beyond 64 tokens arithmetic shows."""
SELF = SelfDraft(STEP, STEP, budget_tokens=512, most_tokens=4)


def test_drafting_pays_only_at_long_contexts_and_large_batches() -> None:
    assert SELF.speedup(256, 1) < 1.0
    assert SELF.speedup(100_000, 8) > 2.0


@pytest.mark.parametrize("batch", BATCHES)
def test_from_the_break_even_on_it_pays(batch: int) -> None:
    tokens = SELF.break_even_tokens(batch)
    assert tokens is not None
    assert SELF.speedup(0.9 * tokens, batch) < 1.0 < SELF.speedup(1.1 * tokens, batch)


token_seconds = st.floats(0, 1e-5)
costs = st.builds(
    ProfileStepCost, per_context_token_s=token_seconds, per_batched_token_s=token_seconds, per_request_s=token_seconds,
    per_context_query_s=token_seconds, constant_s=st.floats(1e-4, 1e-2),
)  # fmt: skip
self_drafts = st.builds(
    SelfDraft, target=costs, draft=costs, budget_tokens=st.integers(1, 4096), most_tokens=st.integers(1, 6),
    request_tokens=st.integers(16, 200_000), kv_tokens=st.integers(1000, 2_000_000),
)  # fmt: skip


@given(self_drafts, st.sampled_from(BATCHES), st.floats(0, 1))
def test_drafting_pays_from_break_even_to_the_longest_context(self_draft: SelfDraft, batch: int, share: float) -> None:
    """Whatever was measured, also where a short context pays and a longer one does not. Two digits are reported."""
    tokens, longest = self_draft.break_even_tokens(batch), self_draft.longest_tokens(batch)
    if tokens is None:
        assert self_draft.speedup(longest, batch) <= 1.0 + 1e-9
    else:
        begin = min(1.06 * tokens + 1, longest)
        assert self_draft.speedup(begin + share * (longest - begin), batch) >= 1.0 - 1e-9


@given(self_drafts, st.sampled_from(BATCHES))
def test_near_the_break_even_it_does_not_pay_yet(self_draft: SelfDraft, batch: int) -> None:
    """So a shorter context is none from which on it pays."""
    tokens = self_draft.break_even_tokens(batch)
    if tokens:
        begin, end = max(0.0, 0.94 * tokens - 1), 1.06 * tokens + 1
        near = [begin + (end - begin) * part / 60 for part in range(61)]
        assert min(self_draft.speedup(context, batch) for context in near) <= 1.03


@given(self_drafts)
def test_from_the_inflection_on_a_larger_batch_gains_no_less(self_draft: SelfDraft) -> None:
    """It holds at every context that the search visits by halving."""
    tokens, context = self_draft.inflection_tokens(), float(self_draft.longest_tokens(BATCHES[-1]))
    while tokens is not None and context > max(1.06 * tokens + 1, 64):
        gains = [self_draft.speedup(context, batch) for batch in BATCHES]
        assert gains == sorted(gains)
        context /= 2


def test_a_context_that_no_request_can_have_is_no_break_even() -> None:
    tokens = SELF.break_even_tokens(1)
    assert tokens is not None
    assert dataclasses.replace(SELF, request_tokens=2 * tokens).break_even_tokens(1) == tokens
    assert dataclasses.replace(SELF, request_tokens=tokens // 2).break_even_tokens(1) is None


def test_contexts_beyond_the_kv_cache_have_no_break_even() -> None:
    tokens = SELF.break_even_tokens(4)
    assert tokens is not None
    full = dataclasses.replace(SELF, kv_tokens=2 * tokens)
    assert full.break_even_tokens(4) is None
    assert full.break_even_tokens(1) is None or full.longest_tokens(1) == 2 * tokens
    assert full.inflection_tokens() is None


def test_drafting_that_pays_at_any_context_has_no_minimum() -> None:
    """It said 260, the shortest one that it looked at."""
    free = dataclasses.replace(SELF, draft=ProfileStepCost(constant_s=1e-6))
    assert free.break_even_tokens(1) == 0


def test_break_even_context_falls_with_batch_up_to_a_point() -> None:
    break_even = [SELF.break_even_tokens(batch) or 0 for batch in (1, 4, 16)]
    assert break_even == sorted(break_even, reverse=True)


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


def test_batches_that_were_not_measured_make_no_inflection() -> None:
    assert dataclasses.replace(SELF, batches=(1,)).inflection_tokens() is None


@pytest.mark.parametrize("draft", [STEP, ProfileStepCost(constant_s=1.0)], ids=["pays", "never pays"])
def test_where_it_pays_is_found_in_a_few_looks(draft: ProfileStepCost, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator evaluates up to 64 at each reconcile while other services wait: all contexts in steps of 5% took it
    1.2 seconds."""
    priced: list[float] = []
    price = ProfileStepCost.seconds

    def noting(cost: ProfileStepCost, context: float, batch: int, tokens: int) -> float:
        priced.append(context)
        return price(cost, context, batch, tokens)

    monkeypatch.setattr(ProfileStepCost, "seconds", noting)
    self_draft = dataclasses.replace(SELF, draft=draft)
    for batch in BATCHES:
        self_draft.break_even_tokens(batch)
    self_draft.inflection_tokens()
    assert 0 < len(priced) < 250
