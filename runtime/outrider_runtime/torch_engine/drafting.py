"""The end of a step: drafters propose what comes next, as the loop's order says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider_runtime.control.batch import NOBODY
from outrider_runtime.loop.caches import Hole
from outrider_runtime.loop.orders import Order
from outrider_runtime.step_clock import StepClock
from outrider_runtime.torch_engine.requests import Request


class Ran(NamedTuple):
    """What a step came to for one request that goes on."""

    request: Request
    place: int
    """Its row in the step."""
    start: int
    """Tokens that the target had computed before."""
    kept: int
    """Of the step's tokens, those that are committed: the first of them."""
    first_row: int
    """Of its tokens among all of the step."""

    @property
    def is_read(self) -> bool:
        """Its prompt is, so that something can be proposed."""
        return self.request.todo == 1


class Finished(NamedTuple):
    """A step whose tokens are committed."""

    ran: Sequence[Ran]
    """Those that go on."""
    between: dict[int, Tensor]
    """Target's layer -> (all of the step's tokens, width) before it, for heads."""


class Drafter(Protocol):
    def close(self, holes: Sequence[tuple[Request, Hole]]) -> None:
        """Run over committed tokens that it missed."""

    def propose(self, step: Finished, asks: Sequence[bool], most: int) -> list[list[int]]:
        """Run over the step's committed tokens, then propose up to `most` tokens for each request that asks."""

    def forget(self, request: str) -> None:
        """It has ended, was preempted, or its KV was taken away."""


@dataclass(slots=True)
class Report:
    """What the loop is told (`loop.steps.Drafted`). Shapes: D drafters, N requests of the step."""

    step: int
    seconds: NDArray[np.float64]
    proposed: NDArray[np.int8]
    proposer: NDArray[np.int8]
    catch_up_s: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


def draft(
    drafters: Sequence[Drafter], number: int, order: Order, requests: Sequence[Request], step: Finished,
    clock: StepClock,
) -> Report:  # fmt: skip
    """Leaves each request its proposals. number: the step's. requests: all of the step."""
    report = Report(
        number, np.full(len(drafters), np.nan), np.zeros(len(requests), np.int8),
        np.full(len(requests), NOBODY, np.int8),
    )  # fmt: skip
    made: dict[int, list[list[int]]] = {}
    for one in np.flatnonzero(order.runs).tolist():
        try:
            made[one] = _run(drafters[one], one, order, requests, step, clock, report)
        except Exception as error:  # whatever a drafter does, requests go on
            report.failures[one] = f"{type(error).__name__}: {error}"[:300]
    _assign(made, order, step.ran, report)
    return report


def _run(
    drafter: Drafter, number: int, order: Order, requests: Sequence[Request], step: Finished, clock: StepClock,
    report: Report,
) -> list[list[int]]:  # fmt: skip
    holes = [(requests[hole.request], hole) for hole in order.holes if hole.drafter == number]
    began = clock.mark()
    if holes:
        drafter.close(holes)
        report.catch_up_s[number] = clock.seconds(began, began := clock.mark())
    asks = [one.is_read and number in order.plan.asked[:, one.place] for one in step.ran]
    made = drafter.propose(step, asks, int(order.plan.passes[number]))
    report.seconds[number] = clock.seconds(began, clock.mark())
    return made


def _assign(made: dict[int, list[list[int]]], order: Order, ran: Sequence[Ran], report: Report) -> None:
    """Each request takes the first proposals in the order in which it asks."""
    for row, one in enumerate(ran):
        for number in order.plan.asked[:, one.place].tolist():
            proposals = made[number][row] if number in made else []
            if proposals:
                one.request.proposals = proposals
                report.proposed[one.place], report.proposer[one.place] = len(proposals), number
                break
