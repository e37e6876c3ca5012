"""The end of a step: drafters propose the tokens that may come next, as the control loop's order says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.loop.orders import Order
from outrider_runtime.loop.shared_answers import SharedAnswers
from outrider_runtime.step_clock import StepClock
from outrider_runtime.torch_engine.engine_request import Request
from outrider_runtime.torch_engine.tree import Tree, merge


class RequestStep(NamedTuple):
    """What one step did for one request whose answer is not complete."""

    request: Request
    place: int
    """Its index among the requests of the step."""
    start: int
    """Tokens whose KV the target had before the step."""
    rows: Sequence[int]
    """Rows, in the step's hidden states, of the request's tokens that are committed."""

    @property
    def end(self) -> int:
        """Tokens whose KV the target has after the step."""
        return self.start + len(self.rows)

    @property
    def can_be_drafted(self) -> bool:
        """Whether the prompt is prefilled, so that drafters can propose what comes next."""
        return self.request.is_prefilled


class CommittedStep(NamedTuple):
    """A step whose accepted tokens are committed."""

    request_steps: Sequence[RequestStep]
    """One for each request whose answer is not complete."""
    layer_inputs: dict[int, Tensor]
    """Target layer -> its input, (T, H), for all T tokens of the step; heads read them."""


class DraftTask(NamedTuple):
    """What one drafter is to propose at the end of one step: a tree per request; width 1 makes it a chain."""

    drafter: int
    """The drafter's number in the control loop, which each proposed node carries."""
    is_requested: Sequence[bool]
    """Whether to propose, for each `RequestStep`."""
    depth: int
    """0: run over the step's committed tokens, to keep the drafter's KV complete, and propose nothing."""
    width: int
    """Nodes at each depth."""

    @property
    def nodes(self) -> int:
        return self.depth * self.width


class TorchDrafter(Protocol):
    """A drafter of this engine. What it has no use for stays as it is here: empty."""

    weight_bytes: int
    kv_bytes_per_token: int
    layers: tuple[int, ...]
    """Layers of the target whose input the drafter reads."""

    def catch_up(self, _gaps: Sequence[tuple[Request, KVGap]], /) -> None:
        """Run over committed tokens that the drafter's KV lacks."""
        return

    def propose(self, step: CommittedStep, task: DraftTask) -> list[Tree]:
        """Run over the step's committed tokens, then propose a tree for each request; empty where none is requested."""

    def share(self, _shared: SharedAnswers, /) -> None:
        """Keep finished answers, and note which requests of the step may use them; in the order of `request_steps`."""
        return

    def forget(self, _request: str, /) -> None:
        """Drop the request's KV: it has ended, was preempted, or its memory was taken away."""
        return


@dataclass(slots=True)
class DraftOutcome:
    """What drafting took, as the control loop reads it (`loop.steps.DraftingResult`). Shapes: D drafters."""

    step: int
    seconds: NDArray[np.float64]
    """(D,): seconds of each drafter, without its catch-up; NaN for one that did not run."""
    catch_up_s: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    """Drafter -> the error that it raised."""
    proposed = proposer = confidence = None
    """Unused columns of the protocol: this engine passes its trees to the loop directly."""


def draft(
    drafters: Sequence[TorchDrafter], step_number: int, order: Order, requests: Sequence[Request],
    step: CommittedStep, clock: StepClock,
) -> DraftOutcome:  # fmt: skip
    """Run the drafters of `order` and leave each request its proposals. requests: all requests of the step."""
    report = DraftOutcome(step_number, np.full(len(drafters), np.nan))
    trees: dict[int, list[Tree]] = {}
    for number in np.flatnonzero(order.runs).tolist():
        try:
            trees[number] = _run(drafters[number], number, order, requests, step, clock, report)
        except Exception as error:  # a drafter that fails costs its proposals, never a request
            report.failures[number] = f"{type(error).__name__}: {error}"[:300]
    for row, request_step in enumerate(step.request_steps):
        numbers = order.plan.drafter_order[:, request_step.place].tolist()
        request_step.request.proposals = merge([trees[number][row] for number in numbers if number in trees])
    return report


def _run(
    drafter: TorchDrafter, number: int, order: Order, requests: Sequence[Request], step: CommittedStep,
    clock: StepClock, report: DraftOutcome,
) -> list[Tree]:  # fmt: skip
    """Close the drafter's KV gaps, let it propose, and note both times in `report`."""
    gaps = [(requests[gap.request], gap) for gap in order.gaps if gap.drafter == number]
    began = clock.mark()
    if gaps:
        drafter.catch_up(gaps)
        caught_up = clock.mark()
        report.catch_up_s[number] = clock.seconds(began, caught_up)
        began = caught_up
    is_requested = [
        request_step.can_be_drafted and number in order.plan.drafter_order[:, request_step.place]
        for request_step in step.request_steps
    ]
    task = DraftTask(number, is_requested, int(order.plan.passes[number]), int(order.plan.widths[number]))
    trees = drafter.propose(step, task)
    report.seconds[number] = clock.seconds(began, clock.mark())
    return trees
