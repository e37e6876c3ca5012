"""Measures with one engine: interleaved rounds over the shapes of the grid, within the time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter
from outrider_runtime.control.step_times import Shape, StepCost
from outrider_runtime.profiler.fitting import MIN_MEASUREMENTS, fit_cost
from outrider_runtime.profiler.grid import (
    HELD_OUT_EVERY,
    MIN_SHAPES,
    EngineLimits,
    GridPoint,
    StepPace,
    drafter_grid,
    feeding_grid,
    held_out,
    most_informative,
    order_round,
    select_affordable,
    target_grid,
)
from outrider_runtime.profiler.host_protocol import VisitOrder
from outrider_runtime.profiler.step_samples import Visit, median_spread, target_measurements

STEPS = 3
"""Fewest steps of a visit."""
MAX_STEPS = 5
"""Most steps of a visit. More than the fewest, so that one may run undisturbed on a busy machine. Not many more: a
disturbance may last for seconds, and later rounds visit the shape again."""
USUAL_ROUNDS = 5
"""Rounds after which a fair spread suffices."""
FIRST_ROUND_SHARE = 0.45
"""Share of the budget after which no new shape is begun, so that there is time to visit each shape twice."""
GOOD_SPREAD = 0.05
"""Run-to-run spread at which measuring ends: further rounds would improve little."""
FAIR_SPREAD = 0.1
"""Run-to-run spread at which measuring ends after the usual rounds; a noisier machine uses the whole budget."""
NOISY_SPREAD = 1.0
"""Run-to-run spread above which there is no profile: its coefficients would describe the neighbours, not the model.
Below it the profile is reported with its spread, and the operator decides whether to call it noisy."""
OVERTIME = 3.0
"""Measuring may take so many times the budget while there is no profile yet. On a busy machine a late profile is better
than none, for which a service would wait forever."""
TARGET_SHAPES = (20, 12)
"""Most shapes of the target: in uniform steps, in varlen steps."""
DRAFTER_SHAPES = (12, 8)
"""Most shapes of a drafter: of an autoregressive one, of one that makes a single pass or call."""
FEEDING_SHAPES = 6
"""Most shapes of a step that only feeds a block drafter. Two coefficients are fitted to them."""
CROSSOVER_ALPHA = 0.7
"""Acceptance rate for which the crossover is calculated: that of an average drafter."""

Measure = Callable[[VisitOrder], Visit]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Budget:
    """Time for measuring, counted from `started`."""

    total_s: float
    started: float
    """Reading of `clock` at the start."""
    clock: Callable[[], float] = time.monotonic

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        return self.total_s - self.elapsed_s

    def is_spent_on(self, series: ShapeSeries) -> bool:
        """Whether the budget is spent; a series that makes no profile yet may take `OVERTIME` times as long."""
        return self.elapsed_s >= self.total_s * (1.0 if series.makes_a_profile else OVERTIME)


@dataclass(slots=True)
class ShapeSeries:
    """The shapes to measure for the target or for one drafter, and the visits so far."""

    drafter: str | None
    """Drafter that proposes meanwhile; None: no drafter."""
    order: list[GridPoint]
    """Shapes to measure, the most informative first."""
    held_out: frozenset[GridPoint]
    """Shapes that judge the fit and do not take part in it."""
    visits: list[Visit] = field(default_factory=list)
    title: str = "target"
    """Name in messages."""
    feeds: bool = False
    """Whether the drafter is fed in shapes without draft tokens."""
    needed: int = field(init=False)
    """Number of shapes that a fit needs."""

    def __post_init__(self) -> None:
        self.needed = min(MIN_SHAPES, len(self.order))

    @property
    def enough(self) -> bool:
        """Whether enough shapes were visited for a fit."""
        return 0 < self.needed <= len({visit.point for visit in self.visits})

    @property
    def repeated(self) -> bool:
        """Whether a shape was visited twice, so that the run-to-run spread is known."""
        return len(self.visits) > len({visit.point for visit in self.visits})

    @property
    def makes_a_profile(self) -> bool:
        """Whether the visits so far suffice for a profile."""
        return self.enough and self.repeated and self.spread <= NOISY_SPREAD

    @property
    def spread(self) -> float:
        """Median run-to-run spread of the shapes."""
        return median_spread(target_measurements(self.visits))

    def drafter_at(self, point: GridPoint) -> str | None:
        """Return the drafter that runs at `point`; None for plain decoding."""
        return self.drafter if point.verify or self.feeds else None

    def keep_visited(self) -> None:
        """Remove the shapes that were not visited. If no held-out shape is left, hold out the last quarter."""
        seen = {visit.point for visit in self.visits}
        self.order = [point for point in self.order if point in seen]
        if not self.held_out & seen:
            self.held_out |= frozenset(self.order[len(self.order) - len(self.order) // HELD_OUT_EVERY :])

    @property
    def suspended(self) -> str:
        """Why the drafter did not run, as a sentence; empty if it did."""
        return next((visit.suspended for visit in reversed(self.visits) if visit.suspended), "")


def target_series(limits: EngineLimits, pace: StepPace, drafter: str | None, budget_s: float) -> ShapeSeries:
    """Return the target's shapes. drafter: proposes in the steps that verify draft tokens."""
    grid = select_affordable(target_grid(limits), pace, budget_s)
    uniform = most_informative([p for p in grid if not p.is_varlen], pace)[: TARGET_SHAPES[0]]
    varlen = most_informative([p for p in grid if p.is_varlen], pace)[: TARGET_SHAPES[1]]
    return ShapeSeries(drafter, _alternate(uniform, varlen), held_out(uniform) | held_out(varlen))


def drafter_series(limits: EngineLimits, pace: StepPace, drafter: Drafter, budget_s: float) -> ShapeSeries:
    """Return a drafter's shapes. The passes of an autoregressive drafter are assumed to double the time of a step."""
    doubled = pace.times(2) if drafter.passes else pace
    reads = drafter.reads and not drafter.is_block  # the time of a block drafter's pass does not depend on its tokens
    grid = select_affordable(drafter_grid(limits, reads=reads, widest=drafter.widest), doubled, budget_s)
    order = most_informative(grid, doubled, passes=drafter.passes)[: DRAFTER_SHAPES[0 if drafter.passes else 1]]
    fed = select_affordable(feeding_grid(limits), pace, budget_s) if drafter.is_block else []
    both = _alternate(order, most_informative(fed, pace)[:FEEDING_SHAPES])
    return ShapeSeries(
        drafter.name, both, frozenset(order[5::3]), title=f"drafter {drafter.name}", feeds=drafter.is_block
    )


def run(series: Sequence[ShapeSeries], measure: Measure, budget: Budget, progress: Progress) -> None:
    """Visit every shape of all series, round by round, until the spread is good or the budget is spent.

    Rounds reduce noise, because the visits of a shape lie far apart in time. A series without a profile gets overtime.
    Raises ProfilingError if the engine fails; earlier visits stay in the series.
    """
    visit = _Visitor(measure, budget, progress)
    _first_round(series, visit)
    _add_crossover(series)
    for number in count(2):
        for role in series:
            visit.visit_all(role, role.order, number)
        worst_spread = max((role.spread for role in series), default=0.0)
        is_spent = all(budget.is_spent_on(role) for role in series)
        if is_spent or worst_spread <= (GOOD_SPREAD if number < USUAL_ROUNDS else FAIR_SPREAD):
            return


@dataclass(frozen=True, slots=True)
class _Visitor:
    measure: Measure
    budget: Budget
    progress: Progress

    def visit_all(self, series: ShapeSeries, points: Sequence[GridPoint], number: int, before: int = 0) -> None:
        """Visit `points` in an order that saves prefills, until the budget is spent.

        number: of the round. before: shapes of the series that were visited in this round already.
        """
        most_steps = STEPS if number == 1 else MAX_STEPS  # the first round must reach every shape
        for index, point in enumerate(order_round(points), start=before + 1):
            if self.budget.is_spent_on(series):
                return
            series.visits.append(self.measure(VisitOrder(point, series.drafter_at(point), STEPS, most_steps)))
            self.progress(
                f"round {number}, {series.title}: shape {index} of {len(series.order)}, {self.budget.elapsed_s:.0f} s "
                f"elapsed, {max(0.0, self.budget.left_s):.0f} s of the budget left: {point}"
            )


def _first_round(series: Sequence[ShapeSeries], visit: _Visitor) -> None:
    """Visit every shape once, a few of each series at a time, the most informative first.

    If the machine is slower than expected, only the least informative shapes are not reached.
    """
    for start in range(0, max((len(role.order) for role in series), default=0), MIN_SHAPES):
        for role in series:
            if start == 0 or visit.budget.elapsed_s < FIRST_ROUND_SHARE * visit.budget.total_s:
                visit.visit_all(role, role.order[start : start + MIN_SHAPES], 1, before=start)
    for role in series:
        role.keep_visited()


def _add_crossover(series: Sequence[ShapeSeries]) -> None:
    """Hold out shapes on both sides of the batch size at which speculation stops paying: errors cost most there."""
    for role in series:
        if role.drafter is None or role.feeds or not any(p.verify == 0 for p in role.order):
            continue
        points = crossover(role)
        role.order += [point for point in points if point not in role.order]
        role.held_out |= frozenset(points)


def crossover(series: ShapeSeries) -> list[GridPoint]:
    """Return shapes around the batch size at which half of the largest draft length gains nothing."""
    uniform = [m for m in target_measurements(series.visits) if m.mode is ExecutionMode.UNIFORM]
    if len(uniform) < MIN_MEASUREMENTS:
        return []
    cost = fit_cost(uniform, ()).cost
    context = min(m.point.context for m in uniform)
    length = sorted({m.point.verify for m in uniform})[-2:][0]  # the second longest
    largest = max(m.point.batch for m in uniform)
    pays = [batch for batch in range(1, largest + 1) if _gain(cost, context, batch, length) > 1.0]
    edge = max(pays, default=1)
    around = {max(1, round(0.75 * edge)), min(largest, round(1.25 * edge) + 1)}
    return [GridPoint(context, batch, length) for batch in sorted(around)] if length else []


def _gain(cost: StepCost, context: int, batch: int, length: int) -> float:
    """Return goodput with draft length `length` / plain goodput, for a drafter that takes no time (TurboSpec eq. 1)."""
    accepted = (1 - CROSSOVER_ALPHA ** (length + 1)) / (1 - CROSSOVER_ALPHA)
    return accepted * cost.seconds(_shape(context, batch, 1)) / cost.seconds(_shape(context, batch, length + 1))


def _shape(context: int, batch: int, tokens: int) -> Shape:
    return Shape(batch * context, batch * tokens, batch, batch * tokens * context / 1000)


def _alternate(first: Sequence[GridPoint], second: Sequence[GridPoint]) -> list[GridPoint]:
    """Merge both orders in proportion, so that every prefix has shapes of each."""
    ranked = [(index / max(1, len(order)), point) for order in (first, second) for index, point in enumerate(order)]
    return [point for _, point in sorted(ranked, key=lambda pair: pair[0])]
