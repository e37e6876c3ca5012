"""Evaluate self-drafting over a window of the context from a latency profile (MagicDec, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider_crds.draft_pool import SparseSelf
from outrider_crds.profile import DrafterProfile, ProfileExecutionMode, ProfileStepCost, TargetProfile

ACCEPTED = 0.8
"""Assumed acceptance rate, since a profile has only times."""
BATCHES = (1, 4, 16, 64)
SHORTEST_TOKENS, LONGEST_TOKENS = 64, 1_000_000
_CLOSE = 1.01
"""Ratio of two contexts that count as equal: results have two digits, the accuracy of the model."""


@dataclass(frozen=True)
class SelfDraft:
    target: ProfileStepCost
    draft: ProfileStepCost
    """Cost of a draft pass over at most `budget_tokens`."""
    budget_tokens: int
    most_tokens: int
    """Largest draft length."""
    batches: tuple[int, ...] = BATCHES
    """Batch sizes in `BATCHES` that were measured."""
    request_tokens: int = LONGEST_TOKENS
    """Longest request in tokens."""
    kv_tokens: int = LONGEST_TOKENS * BATCHES[-1]
    """Tokens in the KV cache, for all requests."""

    def speedup(self, context: float, batch: int) -> float:
        """Goodput / plain goodput at the best draft length; below 1 if no length pays."""
        return self._speedups(batch)(context)

    def longest_tokens(self, batch: int) -> int:
        """Longest context that `batch` requests can have at once."""
        return min(self.request_tokens, self.kv_tokens // batch)

    def break_even_tokens(self, batch: int) -> int | None:
        """Shortest context from which drafting pays, up to the longest one.

        0 if it pays at every context, None if it does not pay at the longest one.
        """
        longest = self.longest_tokens(batch)
        lost = _last_loss(self._gains(batch, beyond=True), self.budget_tokens, longest)
        if lost is None:
            lost = _last_loss(self._gains(batch, beyond=False), 0, min(self.budget_tokens, longest))
        return None if lost == longest else _round_context(lost or 0, longest)

    def inflection_tokens(self) -> int | None:
        """MagicDec's S_inflection: the shortest context from which a larger batch never gains less; None without one.

        The search halves contexts from the longest one of the largest batch. It assumes that the order of the gains
        changes at most once between two of these contexts.
        """
        speedups = [self._speedups(batch) for batch in self.batches]

        def gains(context: float) -> bool:
            pays = speedups[-1](context) > 1.0
            return pays and all(more(context) >= less(context) for less, more in pairwise(speedups))

        return _shortest_context(gains, self.longest_tokens(self.batches[-1])) if len(speedups) > 1 else None

    def _speedups(self, batch: int) -> Callable[[float], float]:
        """Speed-up as a function of the context. Other costs are computed once, since an operator evaluates hundreds of
        profiles."""
        lengths = self._lengths(batch)
        plain_s, plain_token_s = _line(self.target, batch, 1)

        def speedup(context: float) -> float:
            pass_s = self.draft.seconds(min(context, self.budget_tokens), batch, 1)
            step_s = plain_s + context * plain_token_s
            return step_s * max(
                accepted / (verify_s + context * verify_token_s + k * pass_s)
                for k, accepted, verify_s, verify_token_s in lengths
            )

        return speedup

    def _gains(self, batch: int, *, beyond: bool) -> list[tuple[float, float]]:
        """Seconds that each draft length saves: without context, and per context token.

        beyond: for contexts beyond the budget; otherwise for contexts up to it.
        """
        plain_s, plain_token_s = _line(self.target, batch, 1)
        pass_s, pass_token_s = _line(self.draft, batch, 1)
        if beyond:
            pass_s, pass_token_s = pass_s + self.budget_tokens * pass_token_s, 0.0
        return [
            (accepted * plain_s - verify_s - k * pass_s, accepted * plain_token_s - verify_token_s - k * pass_token_s)
            for k, accepted, verify_s, verify_token_s in self._lengths(batch)
        ]

    def _lengths(self, batch: int) -> list[tuple[int, float, float, float]]:
        """Each draft length with its accepted length and the `_line` of its verification."""
        return [(k, _accepted_length(k), *_line(self.target, batch, 1 + k)) for k in range(1, self.most_tokens + 1)]


def self_draft(target: TargetProfile, draft: DrafterProfile, block: SparseSelf, most_tokens: int) -> SelfDraft:
    """The self-draft of a profile. block: settings of the drafter, for profiles without `budget_tokens`."""
    costs = target.costs
    even = costs.get(ProfileExecutionMode.UNIFORM) or next(iter(costs.values()))
    measured = min(target.most_requests or BATCHES[-1], draft.most_requests or BATCHES[-1])
    return SelfDraft(
        even, draft.cost, draft.budget_tokens or block.tokens, most_tokens,
        tuple(batch for batch in BATCHES if batch <= measured),
        target.request_tokens or LONGEST_TOKENS, target.kv_tokens or LONGEST_TOKENS * BATCHES[-1],
    )  # fmt: skip


def _line(cost: ProfileStepCost, batch: int, tokens: int) -> tuple[float, float]:
    """Seconds of a step: without context, and per context token."""
    return cost.without_context_s(batch, tokens), cost.context_token_s(batch, tokens)


def _accepted_length(draft_tokens: int) -> float:
    return (1 - ACCEPTED ** (draft_tokens + 1)) / (1 - ACCEPTED)


def _last_loss(gains: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """Longest context from `start` to `end` at which none of these lines is above 0; None if there is none."""
    for seconds, token_s in gains:
        if token_s > 0:
            end = min(end, -seconds / token_s)
        elif token_s < 0:
            start = max(start, -seconds / token_s)
        elif seconds > 0:
            return None
    return end if start <= end else None


def _shortest_context(holds: Callable[[float], bool], longest: int) -> int | None:
    """Shortest context from which `holds` is true, up to the longest; 0: from the shortest; None: not at the longest.

    Halving the context brackets it, and bisection narrows it down.
    """
    shorter, context = float(longest), float(longest)
    while holds(shorter):
        if shorter <= SHORTEST_TOKENS:
            return 0
        shorter, context = max(shorter / 2, SHORTEST_TOKENS), shorter
    if shorter == longest:
        return None
    while context > shorter * _CLOSE:
        middle = math.sqrt(shorter * context)
        shorter, context = (shorter, middle) if holds(middle) else (middle, context)
    return _round_context(context, longest)


def _round_context(context: float, longest: int) -> int:
    return min(round(float(f"{context:.2g}")), longest)
