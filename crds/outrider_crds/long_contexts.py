"""What a latency profile says of a target that drafts for itself over a window of its context (MagicDec, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from outrider_crds.profile import DrafterProfile, ExecutionMode, StepCost, TargetProfile

ACCEPTED = 0.8
"""Assumed share of the proposals, given that those before were accepted: a profile knows times only."""
BATCHES = (1, 4, 16, 64)
SHORTEST_TOKENS, LONGEST_TOKENS = 256, 1_000_000
_CLOSE = 1.01
"""Two digits are told: the model knows no more."""


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
        return self._speedups(batch)(context)

    def break_even_tokens(self, batch: int) -> int | None:
        """Shortest context from which on drafting pays; None where it never does."""
        speedup = self._speedups(batch)
        return _shortest(lambda context: speedup(context) > 1.0)

    def inflection_tokens(self) -> int | None:
        """MagicDec's S_inflection: the shortest context at which a larger batch gains no less; None where there is
        none."""
        speedups = [self._speedups(batch) for batch in BATCHES]

        def gains(context: float) -> bool:
            pays = speedups[-1](context) > 1.0
            return pays and all(more(context) >= less(context) for less, more in pairwise(speedups))

        return _shortest(gains)

    def _speedups(self, batch: int) -> Callable[[float], float]:
        """Of a context. What does not hang on it is priced once: an operator judges hundreds of profiles."""
        lengths = [(_accepted_length(k), k, *_line(self.target, batch, 1 + k)) for k in range(1, self.most_tokens + 1)]
        plain_s, plain_token_s = _line(self.target, batch, 1)

        def speedup(context: float) -> float:
            pass_s = self.draft.seconds(min(context, self.budget_tokens), batch, 1)
            step_s = plain_s + context * plain_token_s
            return step_s * max(
                accepted / (verify_s + context * verify_token_s + k * pass_s)
                for accepted, k, verify_s, verify_token_s in lengths
            )

        return speedup


def self_draft(target: TargetProfile, draft: DrafterProfile, budget_tokens: int, most_tokens: int) -> SelfDraft:
    costs = target.costs
    even = costs.get(ExecutionMode.UNIFORM) or next(iter(costs.values()))
    return SelfDraft(even, draft.cost, budget_tokens, most_tokens)


def _line(cost: StepCost, batch: int, tokens: int) -> tuple[float, float]:
    """Seconds of a step without context, and of each further token of it."""
    return cost.without_context_s(batch, tokens), cost.context_token_s(batch, tokens)


def _accepted_length(draft_tokens: int) -> float:
    return (1 - ACCEPTED ** (draft_tokens + 1)) / (1 - ACCEPTED)


def _shortest(holds: Callable[[float], bool]) -> int | None:
    """The shortest context at which `holds`, where it goes on holding; contexts that double find it, halves close in.
    None where it does at none."""
    shorter, context = float(SHORTEST_TOKENS), float(SHORTEST_TOKENS)
    while not holds(context):
        if context >= LONGEST_TOKENS:
            return None
        shorter, context = context, min(2 * context, LONGEST_TOKENS)
    while context > shorter * _CLOSE:
        middle = math.sqrt(shorter * context)
        shorter, context = (shorter, middle) if holds(middle) else (middle, context)
    return int(float(f"{context:.2g}"))
