"""vLLM's table of draft lengths by batch size, made from the profile that our controller uses. Pure."""

from __future__ import annotations

from outrider_crds.profile import DrafterProfile, ExecutionMode, TargetProfile
from outrider_runtime.control.costs import DrafterCost, Shape, StepCost


def draft_length_table(
    target: TargetProfile,
    drafter: DrafterProfile,
    *,
    acceptance: float,
    context_tokens: float,
    largest_batch: int,
    most: int,
) -> list[tuple[int, int, int]]:
    """Ranges (first batch size, last, K): each size's K has the most expected tokens a second.

    TurboSpec's l(alpha, K) over the profile's step time, at `context_tokens` a request and one acceptance for every
    position, as an author would have it who measured the hardware once and cannot know the prompts.
    """
    best = [
        _best_length(target, drafter, size, most, acceptance, context_tokens) for size in range(1, largest_batch + 1)
    ]
    table: list[tuple[int, int, int]] = []
    for size, length in enumerate(best, start=1):
        if table and table[-1][2] == length:
            table[-1] = (table[-1][0], size, length)
        else:
            table.append((size, size, length))
    return table


def _best_length(
    target: TargetProfile, drafter: DrafterProfile, batch: int, most: int, acceptance: float, context_tokens: float
) -> int:
    return max(range(most + 1), key=lambda k: _goodput(target, drafter, batch, k, acceptance, context_tokens))


def _goodput(
    target: TargetProfile, drafter: DrafterProfile, batch: int, length: int, acceptance: float, context_tokens: float
) -> float:
    """Tokens a second of `batch` requests that each verify `length` tokens. At 0, stock still runs the draft once."""
    context = batch * context_tokens
    tokens = batch * (length + 1)
    shape = Shape(context, tokens, batch, context * (length + 1) / 1000)
    costs = target.costs
    cost = costs.get(ExecutionMode.UNIFORM) or next(iter(costs.values()))
    draft = DrafterCost(_cost(drafter.cost), autoregressive=drafter.autoregressive)
    accepted = sum(acceptance**position for position in range(length + 1))
    return batch * accepted / (_cost(cost).seconds(shape) + draft.seconds(shape, length))


def _cost(cost: object) -> StepCost:
    return StepCost(**{name: getattr(cost, name) for name in StepCost.__dataclass_fields__})
