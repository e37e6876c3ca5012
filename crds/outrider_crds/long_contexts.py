"""What a latency profile says of a target that drafts for itself over a window of its context (MagicDec, section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from outrider_crds.profile import DrafterProfile, ExecutionMode, StepCost, TargetProfile

ACCEPTED = 0.8
"""Assumed share of the proposals, given that those before were accepted: a profile knows times only."""
BATCHES = (1, 4, 16, 64)
SHORTEST_TOKENS, LONGEST_TOKENS, STEP = 256, 1_000_000, 1.05


@dataclass(frozen=True)
class SelfDraft:
    target: StepCost
    draft: StepCost
    """Of a pass over no more than the budget."""
    budget_tokens: int
    most_tokens: int
    """Largest draft length."""

    def speedup(self, context: float, batch: int) -> float:
        """Over plain decoding, at the draft length that suits best; below 1 where none pays."""
        plain_s = _seconds(self.target, context, batch, 1)
        pass_s = _seconds(self.draft, min(context, self.budget_tokens), batch, 1)
        return max(
            _accepted_length(k) * plain_s / (_seconds(self.target, context, batch, 1 + k) + k * pass_s)
            for k in range(1, self.most_tokens + 1)
        )

    def break_even_tokens(self, batch: int) -> int | None:
        """Shortest context from which on drafting pays; None where it never does."""
        return next((_rounded(context) for context in _contexts() if self.speedup(context, batch) > 1.0), None)

    def inflection_tokens(self) -> int | None:
        """MagicDec's S_inflection: the shortest context at which a larger batch gains no less; None where there is
        none."""
        for context in _contexts():
            gains = [self.speedup(context, batch) for batch in BATCHES]
            if gains[-1] > 1.0 and all(after >= before for before, after in pairwise(gains)):
                return _rounded(context)
        return None


def self_draft(target: TargetProfile, draft: DrafterProfile, budget_tokens: int, most_tokens: int) -> SelfDraft:
    costs = target.costs
    even = costs.get(ExecutionMode.UNIFORM) or next(iter(costs.values()))
    return SelfDraft(even, draft.cost, budget_tokens, most_tokens)


def _seconds(cost: StepCost, context: float, batch: int, tokens: int) -> float:
    """A step of `batch` requests with so many cached tokens and so many tokens each."""
    batched = batch * tokens
    return (
        cost.constant_s
        + cost.per_context_token_s * batch * context
        + (cost.per_batched_token_s + cost.per_logits_token_s) * batched
        + cost.per_batched_token_above_knee_s * max(0.0, batched - cost.knee_tokens)
        + cost.per_request_s * batch
        + cost.per_context_query_s * batched * context / 1000
    )


def _accepted_length(draft_tokens: int) -> float:
    return (1 - ACCEPTED ** (draft_tokens + 1)) / (1 - ACCEPTED)


def _contexts() -> Iterator[float]:
    context = float(SHORTEST_TOKENS)
    while context <= LONGEST_TOKENS:
        yield context
        context *= STEP


def _rounded(context: float) -> int:
    """Two digits: the model knows no more."""
    return int(float(f"{context:.2g}"))
