"""The best time per output token that a latency profile allows."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_crds.profile import DrafterProfile, ProfileExecutionMode, ProfileStepCost, TargetProfile


def best_tpot_s(
    target: TargetProfile,
    drafters: Mapping[str, DrafterProfile],
    acceptance: Mapping[str, float],
    max_draft_tokens: int,
) -> float:
    """Seconds per token of a single request at the best drafter and draft length `k`, including `k = 0`.

    It is the minimum of `T_step(k) / l(alpha, k)` (TurboSpec eq. 2 to 4). `drafters` and `acceptance` are keyed by
    name. Contexts are empty and a drafter without a measured acceptance rate counts as always accepted, so that the
    result is a lower bound.
    """
    cost = target.costs.get(ProfileExecutionMode.UNIFORM) or next(iter(target.costs.values()), ProfileStepCost())
    best = cost.without_context_s(1, 1)
    for name, drafter in drafters.items():
        alpha = acceptance.get(name, 1.0)
        for k in range(1, max_draft_tokens + 1):
            total = draft_s(drafter, k) + cost.without_context_s(1, k + 1)
            best = min(best, total / accepted_length(alpha, k))
    return best


def draft_s(drafter: DrafterProfile, k: int) -> float:
    """Seconds to propose `k` tokens. The first pass covers the target's tokens, each further pass one token."""
    if not drafter.autoregressive:
        return drafter.cost.without_context_s(1, 1)
    first_s = drafter.cost.without_context_s(1, k + 1) + drafter.first_pass.without_context_s(1, k + 1)
    return first_s + (k - 1) * drafter.cost.without_context_s(1, 1)


def accepted_length(alpha: float, k: int) -> float:
    """`l(alpha, k) = (1 - alpha^(k+1)) / (1 - alpha)`, including the bonus token."""
    return sum(alpha**position for position in range(k + 1))
