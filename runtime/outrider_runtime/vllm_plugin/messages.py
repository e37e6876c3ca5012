"""Messages between scheduler and worker, sent as one attribute of vLLM's own step messages.

vLLM pickles `SchedulerOutput` and `ModelRunnerOutput` with their whole `__dict__`. So no separate channel is needed,
and an order always arrives with its step. Drafters are numbers, their positions in `HostedPool.hosted`; requests are in
the order of the step's `num_scheduled_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider_runtime.control.batch import NO_DRAFTER, Ints
from outrider_runtime.control.plans import VerifyPlan
from outrider_runtime.loop.confidences import Calibration
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.loop.orders import Order
from outrider_runtime.loop.shared_answers import SharedAnswers

ATTRIBUTE = "outrider"
IDLE = -1
"""Stands for the draft length of a drafter that does not run."""
Numbers = npt.NDArray[np.int8]


def numbers(values: Any) -> Numbers:
    return np.array(values, dtype=np.int8)


class VerifyOrder(NamedTuple):
    """Scheduler to worker: how the device chooses the proposals to verify among the step's placeholders.

    See `device_ranking`.
    """

    tokens: int
    """Proposals to verify over all requests; never fewer than the forced ones."""
    forced: Numbers
    """(requests,): leading tokens of each request that are verified if they are real."""
    weights: npt.NDArray[np.float32]
    """(requests,): factor of a request's scores."""
    arm: Numbers | None = None
    """(requests,): arm of the draft canary; each arm has its own share of `tokens`. None: no canary."""
    arm_tokens: tuple[int, ...] = ()
    """Parts of `tokens`, by arm."""


class DraftOrder(NamedTuple):
    """Scheduler to worker: what to propose at the end of this step."""

    draft_tokens: int
    """K; 0 for no proposals."""
    passes: Numbers
    """(drafters,): draft length of each drafter. 0: only its first pass runs, which keeps its KV complete; `IDLE`: it
    does not run."""
    chosen: Numbers
    """(requests,): the drafter whose proposal each request gets; `NO_DRAFTER`: none."""
    second: Numbers
    """(requests,): the drafter whose proposal the request gets if the first has none."""
    step: int = 0
    gaps: tuple[KVGap, ...] = ()
    """KV gaps that draft models fill before they propose."""
    verify: VerifyOrder | None = None
    """The order for this step's own placeholders; None: all placeholders are verified."""
    calibration: Calibration | None = None
    """Calibration of the drafters' confidences; None: unknown."""
    shared: SharedAnswers | None = None
    """Finished answers to keep, and which requests may use them; None: requests share nothing."""

    def gaps_of(self, drafter: int) -> list[KVGap]:
        return [gap for gap in self.gaps if gap.drafter == drafter]


def idle_order(drafters: int, requests: int) -> DraftOrder:
    """Make an order in which no drafter runs, for a step that the loop does not know."""
    chosen, second = np.full((2, requests), NO_DRAFTER, dtype=np.int8)
    return DraftOrder(0, np.full(drafters, IDLE, dtype=np.int8), chosen, second)


def verify_order(plan: VerifyPlan, planned: Sequence[str], names: Sequence[str], scheduled: Ints) -> VerifyOrder | None:
    """Convert the plan's device order to the worker's form. None: all that is scheduled is verified.

    planned: requests of the plan. names: requests of the step, which may differ. scheduled: (N,), placeholders of the
    step's requests.
    """
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
    arm = np.where(rows >= 0, np.maximum(device.arm[rows], 0), 0)  # a request without an arm counts in the first
    parts = tuple(
        min(max(part, int(forced[arm == number].sum())), int(scheduled[arm == number].sum()))
        for number, part in enumerate(device.arm_tokens)
    )
    return VerifyOrder(sum(parts), forced.astype(np.int8), weights, numbers(arm), parts)


def draft_order(step: int, order: Order) -> DraftOrder:
    """Convert the loop's order to the worker's form."""
    plan = order.plan
    ranks = plan.drafter_order.astype(np.int8)
    second = ranks[1] if len(ranks) > 1 else np.full_like(ranks[0], NO_DRAFTER)
    passes = np.where(order.runs, plan.passes, IDLE).astype(np.int8)
    return DraftOrder(plan.draft_tokens, passes, ranks[0], second, step, order.gaps)


@dataclass(slots=True)
class DraftReport:
    """Results of one step's order; see `loop.steps.DraftingResult`.

    In asynchronous scheduling it travels with a later step's output, so that the host never waits for the device.
    """

    step: int
    seconds: npt.NDArray[np.float64]
    """(drafters,): seconds of each drafter on the device; NaN if it did not run to its end."""
    proposed: Numbers
    """(requests,): tokens really proposed for each request."""
    proposer: Numbers
    """(requests,): the drafter that proposed them."""
    catch_up_s: dict[int, float] = field(default_factory=dict)
    """Seconds of filling KV gaps, by drafter, not included in `seconds`; absent: no gap was filled."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reason of a failure in a sentence, by drafter; its proposals of this step were dropped."""
    confidence: Numbers | None = None
    """(requests, most tokens): confidences of real proposals, see `loop.confidences`."""


@dataclass(slots=True)
class StepReport:
    """Worker to scheduler, with the output of a step."""

    target_s: float
    """Seconds on the device from the start of the step to its sampled tokens."""
    drafts: list[DraftReport] = field(default_factory=list)
    """Reports of the steps whose drafting ended since the last report, in their order."""
    proposals: Any = None
    """vLLM's DraftTokenIds; None in asynchronous scheduling, which leaves proposals on the device."""
    verified: Numbers | None = None
    """(requests,): placeholders of each request that the target scored; None: all that were scheduled."""
    broken: list[str] = field(default_factory=list)
    """Requests whose hidden state is not finite."""


def attach(message: Any, content: DraftOrder | StepReport) -> None:
    setattr(message, ATTRIBUTE, content)


def attached_order(scheduler_output: Any) -> DraftOrder | None:
    """Return the order of a step; None for vLLM's own dummy steps (warm-up, profiling of memory)."""
    return getattr(scheduler_output, ATTRIBUTE, None)


def attached_report(model_runner_output: Any) -> StepReport | None:
    return getattr(model_runner_output, ATTRIBUTE, None)
