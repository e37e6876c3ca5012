"""One engine's measurements: rounds over the grid, interleaved, inside the time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from outrider_runtime.control.cost.model import Shape, StepCost
from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter
from outrider_runtime.profiler.fitting import LEAST_TO_FIT, fit_cost
from outrider_runtime.profiler.grid import (
    HELD_OUT_EVERY,
    LEAST_SHAPES,
    GridPoint,
    Limits,
    Pace,
    drafter_grid,
    held_out,
    interleaved,
    most_informative,
    target_grid,
    within,
)
from outrider_runtime.profiler.protocol import Ask
from outrider_runtime.profiler.samples import Visit, median_spread, target_measurements

STEPS = 3
MOST_STEPS = 5
"""Steps of one visit: more where the machine is busy, so that one of them may run undisturbed. Not many more: what
disturbs it may last for seconds, and further rounds come later."""
USUAL_ROUNDS = 5
FIRST_ROUND_SHARE = 0.45
"""Share of the budget after which no new shapes are taken up: every shape is to be visited twice."""
GOOD_SPREAD = 0.05
"""Below this run-to-run spread further rounds would only repeat what is known."""
FAIR_SPREAD = 0.1
"""Enough after the usual rounds; a noisier machine is measured on until the budget is spent."""
NOISY_SPREAD = 1.0
"""Above this run-to-run spread the coefficients would say more about the neighbours than about the model. Below it the
profile is given with its spread, and the operator decides what to call noisy."""
OVERTIME = 3.0
"""Budgets that measuring may take where one does not make a profile: on a busy machine a late one is better than none,
without which a service may wait for ever."""
TARGET_SHAPES = (20, 12)
"""At most: uniform, ragged."""
DRAFTER_SHAPES = (12, 8)
"""At most: a neural drafter's, a prompt lookup's."""
CROSSOVER_ALPHA = 0.7
"""Acceptance rate at which the crossover is looked for; a middling drafter's."""

Measure = Callable[[Ask], Visit]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that measuring may take, running since `started`."""

    total_s: float
    started: float
    clock: Callable[[], float] = time.monotonic

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        return self.total_s - self.elapsed_s

    def is_spent_on(self, series: Series) -> bool:
        """One that makes no profile yet may take longer."""
        return self.elapsed_s >= self.total_s * (1.0 if series.makes_a_profile else OVERTIME)


@dataclass(slots=True)
class Series:
    """What one role (the target, or one drafter) asks for, and what came of it."""

    drafter: str | None
    """Who proposes while it is measured."""
    order: list[GridPoint]
    """The most informative first."""
    held_out: frozenset[GridPoint]
    visits: list[Visit] = field(default_factory=list)
    title: str = "target"
    needed: int = field(init=False)
    """Shapes below which a fit would be a guess with coefficients."""

    def __post_init__(self) -> None:
        self.needed = min(LEAST_SHAPES, len(self.order))

    @property
    def enough(self) -> bool:
        return 0 < self.needed <= len({visit.point for visit in self.visits})

    @property
    def repeated(self) -> bool:
        """Some shape was visited twice, so that the run-to-run spread is known."""
        return len(self.visits) > len({visit.point for visit in self.visits})

    @property
    def makes_a_profile(self) -> bool:
        return self.enough and self.repeated and self.spread <= NOISY_SPREAD

    @property
    def spread(self) -> float:
        return median_spread(target_measurements(self.visits))

    def asked(self, point: GridPoint) -> str | None:
        """Who proposes at `point`."""
        return self.drafter if point.verify else None

    def keep_visited(self) -> None:
        """Forget the shapes that there was no time for. A short design holds out its least informative quarter."""
        seen = {visit.point for visit in self.visits}
        self.order = [point for point in self.order if point in seen]
        if not self.held_out & seen:
            self.held_out |= frozenset(self.order[len(self.order) - len(self.order) // HELD_OUT_EVERY :])

    @property
    def suspended(self) -> str:
        """Why its drafter did not run, in a sentence; empty when it did."""
        return next((visit.suspended for visit in reversed(self.visits) if visit.suspended), "")


def target_series(limits: Limits, pace: Pace, drafter: str | None, budget_s: float) -> Series:
    """The target's shapes; `drafter` proposes where lengths above 0 are verified."""
    grid = within(target_grid(limits), pace, budget_s)
    even = most_informative([p for p in grid if not p.ragged], pace)[: TARGET_SHAPES[0]]
    ragged = most_informative([p for p in grid if p.ragged], pace)[: TARGET_SHAPES[1]]
    kept = held_out(even) | held_out(ragged)
    return Series(drafter, _alternating(even, ragged), kept)


def drafter_series(limits: Limits, pace: Pace, drafter: Drafter, budget_s: float) -> Series:
    """A drafter's shapes; its own passes are taken to double the step."""
    doubled = pace.times(2) if drafter.passes else pace
    reads = drafter.reads and not drafter.is_block  # a block's pass does not grow with the tokens that are fed
    grid = within(drafter_grid(limits, reads=reads, widest=drafter.widest), doubled, budget_s)
    order = most_informative(grid, doubled, passes=drafter.passes)[: DRAFTER_SHAPES[0 if drafter.passes else 1]]
    return Series(drafter.name, order, frozenset(order[5::3]), title=f"drafter {drafter.name}")


def run(series: Sequence[Series], measure: Measure, budget: Budget, progress: Progress) -> None:
    """Visit every shape of all series in turn, again and again until they repeat well or the budget is spent; longer
    where it did not make a profile.

    Rounds fight noise: a shape's visits lie far apart in time. Raises ProfilingError when the engine fails; what
    was measured before stays in the series.
    """
    visit = _Visitor(measure, budget, progress)
    _first_round(series, visit)
    _add_crossover(series)
    for number in count(2):
        for one in series:
            visit.all(one, one.order, number)
        worst = max((one.spread for one in series), default=0.0)
        is_spent = all(budget.is_spent_on(one) for one in series)
        if is_spent or worst <= (GOOD_SPREAD if number < USUAL_ROUNDS else FAIR_SPREAD):
            return


@dataclass(frozen=True, slots=True)
class _Visitor:
    measure: Measure
    budget: Budget
    progress: Progress

    def all(self, series: Series, points: Sequence[GridPoint], number: int, before: int = 0) -> None:
        """Visit `points` in an order that spares prefills, until the budget is spent; `before` were in this round."""
        most = STEPS if number == 1 else MOST_STEPS  # first of all, something of every shape
        for index, point in enumerate(interleaved(points), start=before + 1):
            if self.budget.is_spent_on(series):
                return
            series.visits.append(self.measure(Ask(point, series.asked(point), STEPS, most)))
            self.progress(
                f"round {number}, {series.title}: shape {index} of {len(series.order)}, {self.budget.elapsed_s:.0f} s "
                f"elapsed, {max(0.0, self.budget.left_s):.0f} s of the budget left: {point}"
            )


def _first_round(series: Sequence[Series], visit: _Visitor) -> None:
    """A first look at every shape, a few of each series at a time, the most informative first.

    Where the machine is slower than it seemed, what is left out at the end is what matters least.
    """
    for start in range(0, max((len(one.order) for one in series), default=0), LEAST_SHAPES):
        for one in series:
            if start == 0 or visit.budget.elapsed_s < FIRST_ROUND_SHARE * visit.budget.total_s:
                visit.all(one, one.order[start : start + LEAST_SHAPES], 1, before=start)
    for one in series:
        one.keep_visited()


def _add_crossover(series: Sequence[Series]) -> None:
    """Hold out shapes on both sides of the batch size where speculation stops paying: errors hurt most there."""
    for one in series:
        if one.drafter is None or not any(p.verify == 0 for p in one.order):
            continue
        points = crossover(one)
        one.order += [point for point in points if point not in one.order]
        one.held_out |= frozenset(points)


def crossover(series: Series) -> list[GridPoint]:
    """Shapes around the batch size at which verifying about half of the longest proposals gains nothing."""
    even = [m for m in target_measurements(series.visits) if m.mode is ExecutionMode.UNIFORM]
    if len(even) < LEAST_TO_FIT:
        return []
    cost = fit_cost(even, ()).cost
    context = min(m.point.context for m in even)
    length = sorted({m.point.verify for m in even})[-2:][0]  # the second longest
    largest = max(m.point.batch for m in even)
    pays = [batch for batch in range(1, largest + 1) if _gain(cost, context, batch, length) > 1.0]
    edge = max(pays, default=1)
    around = {max(1, round(0.75 * edge)), min(largest, round(1.25 * edge) + 1)}
    return [GridPoint(context, batch, length) for batch in sorted(around)] if length else []


def _gain(cost: StepCost, context: int, batch: int, length: int) -> float:
    """Goodput with `length` verified tokens over goodput without, the draft for free (TurboSpec eq. 1)."""
    accepted = (1 - CROSSOVER_ALPHA ** (length + 1)) / (1 - CROSSOVER_ALPHA)
    return accepted * cost.seconds(_shape(context, batch, 1)) / cost.seconds(_shape(context, batch, length + 1))


def _shape(context: int, batch: int, tokens: int) -> Shape:
    return Shape(batch * context, batch * tokens, batch, batch * tokens * context / 1000)


def _alternating(first: Sequence[GridPoint], second: Sequence[GridPoint]) -> list[GridPoint]:
    """Both orders woven into one in proportion, so that a prefix holds some of each."""
    ranked = [(index / max(1, len(order)), point) for order in (first, second) for index, point in enumerate(order)]
    return [point for _, point in sorted(ranked, key=lambda pair: pair[0])]
