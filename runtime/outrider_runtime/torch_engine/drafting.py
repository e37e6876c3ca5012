"""The end of a step: drafters propose what comes next, as the loop's order says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider_runtime.loop.caches import Hole
from outrider_runtime.loop.orders import Order
from outrider_runtime.step_clock import StepClock
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.tree import Tree, merged


class RequestStep(NamedTuple):
    """What a step came to for one request that goes on."""

    request: Request
    place: int
    """Its row in the step."""
    start: int
    """Tokens that the target had computed before."""
    rows: Sequence[int]
    """Of its tokens that are committed, their places among all tokens of the step."""

    @property
    def end(self) -> int:
        """Tokens that the target has computed."""
        return self.start + len(self.rows)

    @property
    def is_read(self) -> bool:
        """Something can be proposed."""
        return self.request.is_read


class CommittedStep(NamedTuple):
    """A step whose tokens are committed."""

    ran: Sequence[RequestStep]
    """Those that go on."""
    between: dict[int, Tensor]
    """Target's layer -> (all of the step's tokens, width) before it, for heads."""


class DraftTask(NamedTuple):
    """What a drafter is to propose: trees, chains where they are of width 1."""

    drafter: int
    """The loop's number of it, which goes into nodes."""
    asks: Sequence[bool]
    """Which of the requests that go on."""
    depth: int
    """0: it runs over the step's committed tokens, and proposes nothing."""
    width: int

    @property
    def nodes(self) -> int:
        return self.depth * self.width


class TorchDrafter(Protocol):
    """`close` and `forget` do nothing in one without a cache."""

    weight_bytes: int
    kv_bytes_per_token: int
    layers: tuple[int, ...]
    """Of the target, before which it reads hidden states."""

    def close(self, _holes: Sequence[tuple[Request, Hole]], /) -> None:
        """Run over committed tokens that it missed."""
        return

    def propose(self, step: CommittedStep, ask: DraftTask) -> list[Tree]:
        """Run over the step's committed tokens, then propose for each request that asks; an empty tree for others."""

    def forget(self, _request: str, /) -> None:
        """It has ended, was preempted, or its KV was taken away."""
        return


@dataclass(slots=True)
class DraftReport:
    """What the loop is told (`loop.steps.Drafted`). Shapes: D drafters, N requests of the step."""

    step: int
    seconds: NDArray[np.float64]
    catch_up_s: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    proposed = proposer = confidence = None
    """The engine hands over its trees themselves."""


def draft(
    drafters: Sequence[TorchDrafter], number: int, order: Order, requests: Sequence[Request], step: CommittedStep,
    clock: StepClock,
) -> DraftReport:  # fmt: skip
    """Leaves each request its proposals. number: the step's. requests: all of the step."""
    report = DraftReport(number, np.full(len(drafters), np.nan))
    made: dict[int, list[Tree]] = {}
    for one in np.flatnonzero(order.runs).tolist():
        try:
            made[one] = _run(drafters[one], one, order, requests, step, clock, report)
        except Exception as error:  # whatever a drafter does, requests go on
            report.failures[one] = f"{type(error).__name__}: {error}"[:300]
    for row, ran in enumerate(step.ran):
        asked = order.plan.asked[:, ran.place].tolist()
        ran.request.proposals = merged([made[one][row] for one in asked if one in made])
    return report


def _run(
    drafter: TorchDrafter, number: int, order: Order, requests: Sequence[Request], step: CommittedStep,
    clock: StepClock, report: DraftReport,
) -> list[Tree]:  # fmt: skip
    holes = [(requests[hole.request], hole) for hole in order.holes if hole.drafter == number]
    began = clock.mark()
    if holes:
        drafter.close(holes)
        closed = clock.mark()
        report.catch_up_s[number], began = clock.seconds(began, closed), closed
    asks = [one.is_read and number in order.plan.asked[:, one.place] for one in step.ran]
    ask = DraftTask(number, asks, int(order.plan.passes[number]), int(order.plan.widths[number]))
    made = drafter.propose(step, ask)
    report.seconds[number] = clock.seconds(began, clock.mark())
    return made
