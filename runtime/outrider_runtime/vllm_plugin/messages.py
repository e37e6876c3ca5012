"""What scheduler and worker tell each other. Both travel as one attribute on vLLM's own step messages.

vLLM pickles `SchedulerOutput` and `ModelRunnerOutput` with their whole `__dict__`, so no channel of our own is
needed, and an order can never meet the wrong step. Drafters are numbers, their places in `Pool.hosted`; requests are
in the order of the step's `num_scheduled_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider_runtime.control.data.batch import NOBODY, Ints
from outrider_runtime.control.data.plans import VerifyPlan
from outrider_runtime.loop.confidences import Calibration
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.loop.orders import Order

ATTRIBUTE = "outrider"
IDLE = -1
Numbers = npt.NDArray[np.int8]


def numbers(values: Any) -> Numbers:
    return np.array(values, dtype=np.int8)


class VerifyOrder(NamedTuple):
    """Scheduler to worker: how the device chooses, among the step's placeholders, the tokens that are verified; see
    `device_ranking`."""

    tokens: int
    """Proposals to verify; no fewer than are forced."""
    forced: Numbers
    """(requests,): first tokens of each that are verified if they are real."""
    weights: npt.NDArray[np.float32]
    """(requests,)"""
    arm: Numbers | None = None
    """(requests,): arm of the draft canary; each has tokens of its own. None: no canary."""
    arm_tokens: tuple[int, ...] = ()
    """Parts of `tokens`, by arm."""


class DraftOrder(NamedTuple):
    """Scheduler to worker: what to propose at the end of this step."""

    draft_tokens: int
    """K; 0 for no proposals."""
    passes: Numbers
    """(drafters,): tokens that each proposes for a request; 0: its first pass only, which keeps its KV whole; IDLE: it
    does not run."""
    chosen: Numbers
    """(requests,): whose proposals each gets; NOBODY: none."""
    second: Numbers
    """(requests,): whose it gets where its own drafter finds nothing."""
    step: int = 0
    gaps: tuple[KVGap, ...] = ()
    """What draft models run over before they propose."""
    verify: VerifyOrder | None = None
    """The order for this step's own placeholders; None: all of them are verified."""
    calibration: Calibration | None = None
    """What the drafters' confidences mean; None: nothing is known of it."""

    def gaps_of(self, drafter: int) -> list[KVGap]:
        return [gap for gap in self.gaps if gap.drafter == drafter]


def idle_order(drafters: int, requests: int) -> DraftOrder:
    """Nobody runs, and no books know of it."""
    chosen, second = np.full((2, requests), NOBODY, dtype=np.int8)
    return DraftOrder(0, np.full(drafters, IDLE, dtype=np.int8), chosen, second)


def verify_order(plan: VerifyPlan, planned: Sequence[str], names: Sequence[str], scheduled: Ints) -> VerifyOrder | None:
    """The plan's order to the device, as the worker needs it. None: all that is scheduled is verified.

    planned: the requests that the plan is for. names: of the step's, which may be others. scheduled: (N,), their
    placeholders."""
    device = plan.device
    if device is None or not scheduled.any():
        return None
    row = {name: row for row, name in enumerate(planned)}
    rows = np.array([row.get(name, -1) for name in names])
    forced = np.minimum(np.where(rows >= 0, device.forced[rows], 0), scheduled)
    weights = np.where(rows >= 0, device.weights[rows], 1.0).astype(np.float32)
    if device.arm is None:
        tokens = min(max(device.tokens, int(forced.sum())), int(scheduled.sum()))
        return VerifyOrder(tokens, forced.astype(np.int8), weights)
    arm = np.where(rows >= 0, np.maximum(device.arm[rows], 0), 0)  # a request of no arm goes with the first
    parts = tuple(
        min(max(part, int(forced[arm == number].sum())), int(scheduled[arm == number].sum()))
        for number, part in enumerate(device.arm_tokens)
    )
    return VerifyOrder(sum(parts), forced.astype(np.int8), weights, numbers(arm), parts)


def draft_order(step: int, order: Order) -> DraftOrder:
    """The loop's order as the worker needs it."""
    plan = order.plan
    ranks = np.full((2, plan.asked.shape[1]), NOBODY, dtype=np.int8)
    ranks[: len(plan.asked)] = plan.asked[:2]
    passes = np.where(order.runs, plan.passes, IDLE).astype(np.int8)
    return DraftOrder(plan.draft_tokens, passes, ranks[0], ranks[1], step, order.gaps)


@dataclass(slots=True)
class DraftReport:
    """What came of one step's order. In asynchronous scheduling it travels with a later step's output: nobody waits
    for the device."""

    step: int
    seconds: npt.NDArray[np.float64]
    """(drafters,): the device's time; NaN where a drafter did not run to its end."""
    proposed: Numbers
    """(requests,): real proposals of each."""
    proposer: Numbers
    """(requests,): whose they are."""
    catch_up_s: dict[int, float] = field(default_factory=dict)
    """Drafter -> what closing its gaps of the order took, which `seconds` does not hold; absent: none are closed."""
    failures: dict[int, str] = field(default_factory=dict)
    """Drafter -> why it failed, in a sentence; its proposals of this step were dropped."""
    confidence: Numbers | None = None
    """(requests, most tokens): see `loop.confidences`; of proposals that are real."""


@dataclass(slots=True)
class StepReport:
    """Worker to scheduler, with the output of a step."""

    target_s: float
    """The device's time from the step's beginning to its sampled tokens."""
    drafts: list[DraftReport] = field(default_factory=list)
    """Of the steps whose drafting is over since the last report, in their order."""
    proposals: Any = None
    """vLLM's DraftTokenIds, a ragged list; None in asynchronous scheduling, which leaves them on the device."""
    verified: Numbers | None = None
    """(requests,): placeholders of each that the target scored; None: all that were scheduled."""


def attach(message: Any, content: DraftOrder | StepReport) -> None:
    setattr(message, ATTRIBUTE, content)


def attached_order(scheduler_output: Any) -> DraftOrder | None:
    """None for vLLM's own dummy steps (warm-up, profiling of memory)."""
    return getattr(scheduler_output, ATTRIBUTE, None)


def attached_report(model_runner_output: Any) -> StepReport | None:
    return getattr(model_runner_output, ATTRIBUTE, None)
