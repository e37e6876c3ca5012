"""The best time per output token that a profile says can be reached."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_crds.profile import DrafterProfile, ExecutionMode, StepCost, TargetProfile


def best_tpot_s(
    target: TargetProfile,
    drafters: Mapping[str, DrafterProfile],
    acceptance: Mapping[str, float],
    max_draft_tokens: int,
) -> float:
    """Seconds per token of one request alone, at the best drafter and draft length `k` (0 included).

    `T_step(k) / l(alpha, k)` (TurboSpec eq. 2 to 4). `drafters` and `acceptance` by name; a drafter whose acceptance
    was not measured counts as always right, so that a value below the result is out of reach for certain.
    """
    cost = target.costs.get(ExecutionMode.UNIFORM) or next(iter(target.costs.values()), StepCost())
    best = step_s(cost, batched=1)
    for name, drafter in drafters.items():
        alpha = acceptance.get(name, 1.0)
        for k in range(1, max_draft_tokens + 1):
            total = draft_s(drafter, k) + step_s(cost, batched=k + 1)
            best = min(best, total / accepted_length(alpha, k))
    return best


def step_s(cost: StepCost, batched: int) -> float:
    """Seconds of a forward pass of one request with an empty context: the least it can take."""
    above_knee = max(0.0, batched - cost.knee_tokens)
    return (
        (cost.per_batched_token_s + cost.per_logits_token_s) * batched
        + cost.per_batched_token_above_knee_s * above_knee
        + cost.per_request_s
        + cost.constant_s
    )


def draft_s(drafter: DrafterProfile, k: int) -> float:
    """Seconds of proposing `k` tokens: the first pass covers the target's tokens, the others one each."""
    if not drafter.autoregressive:
        return step_s(drafter.cost, batched=1)
    first_s = step_s(drafter.cost, batched=k + 1) + step_s(drafter.first_pass, batched=k + 1)
    return first_s + (k - 1) * step_s(drafter.cost, batched=1)


def accepted_length(alpha: float, k: int) -> float:
    """`l(alpha, k) = (1 - alpha^(k+1)) / (1 - alpha)`, the bonus token included."""
    return sum(alpha**position for position in range(k + 1))
