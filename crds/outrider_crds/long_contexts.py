"""What a latency profile says of a target that drafts for itself over a window of its context (MagicDec, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider_crds.profile import DrafterProfile, ExecutionMode, StepCost, TargetProfile
from outrider_crds.spec import SparseSelf

ACCEPTED = 0.8
"""Assumed share of the proposals, given that those before were accepted: a profile knows times only."""
BATCHES = (1, 4, 16, 64)
SHORTEST_TOKENS, LONGEST_TOKENS = 64, 1_000_000
_CLOSE = 1.01
"""Ratio of two contexts that count as one: two digits are reported, as the model knows no more."""


@dataclass(frozen=True)
class SelfDraft:
    target: StepCost
    draft: StepCost
    """Cost of a pass over no more than the budget."""
    budget_tokens: int
    most_tokens: int
    """Largest draft length."""
    batches: tuple[int, ...] = BATCHES
    """Those of `BATCHES` that were measured."""
    request_tokens: int = LONGEST_TOKENS
    """That a request may take."""
    kv_tokens: int = LONGEST_TOKENS * BATCHES[-1]
    """That all of them may take."""

    def speedup(self, context: float, batch: int) -> float:
        """Goodput / plain goodput at the best draft length; below 1 where none pays."""
        return self._speedups(batch)(context)

    def longest_tokens(self, batch: int) -> int:
        """The longest context that so many requests can have."""
        return min(self.request_tokens, self.kv_tokens // batch)

    def break_even_tokens(self, batch: int) -> int | None:
        """Shortest context from which on drafting pays, up to the longest; 0: it pays at each; None: not at the
        longest."""
        longest = self.longest_tokens(batch)
        lost = _last_loss(self._gains(batch, beyond=True), self.budget_tokens, longest)
        if lost is None:
            lost = _last_loss(self._gains(batch, beyond=False), 0, min(self.budget_tokens, longest))
        return None if lost == longest else _reported(lost or 0, longest)

    def inflection_tokens(self) -> int | None:
        """MagicDec's S_inflection: the shortest context from which on a larger batch gains no less, up to the longest
        of the largest batch; None where there is none. Contexts that halve are looked at; between two of them it
        changes once at most."""
        speedups = [self._speedups(batch) for batch in self.batches]

        def gains(context: float) -> bool:
            pays = speedups[-1](context) > 1.0
            return pays and all(more(context) >= less(context) for less, more in pairwise(speedups))

        return _from_which_on(gains, self.longest_tokens(self.batches[-1])) if len(speedups) > 1 else None

    def _speedups(self, batch: int) -> Callable[[float], float]:
        """Speed-up as a function of the context. What does not depend on it is priced once: an operator judges
        hundreds of profiles."""
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
        """Seconds that each draft length saves without context, and with each further token of it. beyond: of contexts
        beyond the budget, or up to it."""
        plain_s, plain_token_s = _line(self.target, batch, 1)
        pass_s, pass_token_s = _line(self.draft, batch, 1)
        if beyond:
            pass_s, pass_token_s = pass_s + self.budget_tokens * pass_token_s, 0.0
        return [
            (accepted * plain_s - verify_s - k * pass_s, accepted * plain_token_s - verify_token_s - k * pass_token_s)
            for k, accepted, verify_s, verify_token_s in self._lengths(batch)
        ]

    def _lengths(self, batch: int) -> list[tuple[int, float, float, float]]:
        """Each draft length with its accepted length, and its `_line` of verifying."""
        return [(k, _accepted_length(k), *_line(self.target, batch, 1 + k)) for k in range(1, self.most_tokens + 1)]


def self_draft(target: TargetProfile, draft: DrafterProfile, block: SparseSelf, most_tokens: int) -> SelfDraft:
    """block: what the drafter's pages are rounded up from, for profiles that do not tell."""
    costs = target.costs
    even = costs.get(ExecutionMode.UNIFORM) or next(iter(costs.values()))
    measured = min(target.most_requests or BATCHES[-1], draft.most_requests or BATCHES[-1])
    return SelfDraft(
        even, draft.cost, draft.budget_tokens or block.tokens, most_tokens,
        tuple(batch for batch in BATCHES if batch <= measured),
        target.request_tokens or LONGEST_TOKENS, target.kv_tokens or LONGEST_TOKENS * BATCHES[-1],
    )  # fmt: skip


def _line(cost: StepCost, batch: int, tokens: int) -> tuple[float, float]:
    """Seconds of a step without context, and of each further token of it."""
    return cost.without_context_s(batch, tokens), cost.context_token_s(batch, tokens)


def _accepted_length(draft_tokens: int) -> float:
    return (1 - ACCEPTED ** (draft_tokens + 1)) / (1 - ACCEPTED)


def _last_loss(gains: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """The longest context between `start` and `end` at which none of these lines is above 0; None where one is at
    each."""
    for seconds, token_s in gains:
        if token_s > 0:
            end = min(end, -seconds / token_s)
        elif token_s < 0:
            start = max(start, -seconds / token_s)
        elif seconds > 0:
            return None
    return end if start <= end else None


def _from_which_on(holds: Callable[[float], bool], longest: int) -> int | None:
    """The shortest context from which on `holds`, up to the longest; 0: at each that is looked at; None: not at the
    longest. Contexts that halve find it, halves close in."""
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
    return _reported(context, longest)


def _reported(context: float, longest: int) -> int:
    return min(round(float(f"{context:.2g}")), longest)
