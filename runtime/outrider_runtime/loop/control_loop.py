"""The control loop of one engine: the controller behind a lock, and the engine's counters.

The scheduler's thread plans and observes; the reporter's thread reconfigures and reads the state.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import NamedTuple

import numpy as np
from outrider_crds.base import seconds
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.runtime_config import BootConfig, HotConfig

from outrider_runtime.control.batch import NO_DRAFTER, Batch, Bools, Ints
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.plans import DraftPlan, Forest, Purpose, VerifyPlan
from outrider_runtime.control.settings import DraftPrefill, HotSettings, Mode, Settings, SLOClass
from outrider_runtime.control.state import State, Weighed
from outrider_runtime.control.step_times import LatencyModel
from outrider_runtime.drafters import traits
from outrider_runtime.drafters.block import BlockCheckpoint
from outrider_runtime.loop.adapter_counts import AdapterCounter
from outrider_runtime.loop.arm_counts import ArmCounter, canary_problem
from outrider_runtime.loop.confidences import Calibration, Calibrator
from outrider_runtime.loop.drafter_availability import Availability
from outrider_runtime.loop.slo_accounting import SLOCounter
from outrider_runtime.loop.slots import SLOTS_PER_REQUEST
from outrider_runtime.loop.steps import FinishedStep
from outrider_runtime.loop.waiting import patience_s

MOST_FAILURES, FAILURES_WITHIN_S = 3, 60.0
"""Exceptions within so many seconds that suspend all drafters: one costs a step its drafts, a defect comes again."""
MOST_NAMES = 8
"""Requests of a failed step that the log names."""
logger = logging.getLogger("vllm.outrider")  # vLLM configures handlers for its own name only


class UnusableConfigError(ValueError):
    """A hot config does not fit this pod; the one before it stays in force."""


class Decision(NamedTuple):
    """A step's draft plan, and what it depends on."""

    batch: Batch
    plan: DraftPlan
    weighed: Weighed | None
    requests: Sequence[str] = ()
    """Names of the batch's requests; empty where they are not known."""


class ControlLoop:
    def __init__(
        self, boot: BootConfig, hot: HotConfig, hosted: Sequence[DrafterSpec], *, max_requests: int,
        left_out: Mapping[str, str] | None = None, largest_graph_tokens: int | None = None,
        page_tokens: int = 1, widest: int = 1, scores_placeholders: bool = False, device_ranks: bool = False,
        blocks: Mapping[str, BlockCheckpoint] | None = None, clock: Callable[[], float] = time.monotonic, seed: int = 0,
    ) -> None:  # fmt: skip
        """hosted: drafters that the engine was started with; a drafter's number is its position.

        left_out: drafters that are not hosted or were not loaded, with the reason. max_requests: concurrent requests.
        page_tokens: tokens in a page of the engine's KV cache. widest: most nodes at a depth of the trees that the
        engine verifies; 1: chains. scores_placeholders, device_ranks: see `Settings`. blocks: checkpoints of block
        drafters, by name.
        """
        self.boot = boot
        self.hosted = tuple(hosted)
        self.numbers = {drafter.name: number for number, drafter in enumerate(self.hosted)}
        self.left_out = dict(left_out or {})
        self.blocks = dict(blocks or {})
        self.slo = SLOCounter()
        self.adapters = AdapterCounter()
        self.listeners: list[Callable[[FinishedStep], None]] = []
        """Callbacks for each finished step, on the scheduler's thread; the profiler measures with them."""
        self.profiled_placeholders: int | None = None
        """Placeholders of each request that a profiling run verifies, whether they hold a proposal or not.

        None, as in serving: the plan decides which proposals are verified.
        """
        self.lock = RLock()
        self.failures = 0
        """Number of exceptions in decisions, and in the bookkeeping of steps and requests."""
        self._last_failure = ""
        self._failed_at: deque[float] = deque(maxlen=MOST_FAILURES)
        self.broken_answers = 0
        """Requests that ended since the engine computed NaN or infinity for them."""
        self.running = 0
        """Requests that the engine runs; the stepper updates it."""
        self.request_names: Sequence[str] = ()
        """Names of the requests in the next batch to decide on; the stepper updates it."""
        self.caught_up_tokens = 0
        self.catch_up_s = 0.0
        self._decided: tuple[Batch, DraftPlan, Sequence[str]] | None = None
        self._clock = clock
        self._patience_s: dict[str, float] = {}
        self._tpot_s: dict[str, float] = {}
        self.settings = Settings(
            drafters=tuple(traits(drafter, page_tokens, widest, self.blocks.get(drafter.name)) for drafter in hosted),
            max_draft_tokens=boot.max_draft_tokens,
            slots=SLOTS_PER_REQUEST * max_requests,
            largest_graph_tokens=largest_graph_tokens,
            hot=hot_settings(hot),
            scores_placeholders=scores_placeholders,
            device_ranks=device_ranks,
        )
        compares = device_ranks or len(hosted) > 1
        self._calibrator = Calibrator(len(hosted), max(1, boot.max_draft_tokens)) if compares else None
        rng = np.random.default_rng(seed)
        self.arms = ArmCounter(rng)
        self._controller = Controller(self.settings, None, clock=time.perf_counter, rng=rng)
        self._available = Availability(self._controller, self.numbers, self.left_out, clock)
        self.configure(hot if self.config_problem(hot) == "" else hot.model_copy(update={"canary": None}))

    # -- calls of the engine at every step ----------------------------------------------------------------------

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        with self.lock:
            try:
                return self._controller.plan_verify(batch, forest)
            except Exception as error:
                self.failed(error, "the choice of proposals to verify")
                return VerifyPlan(np.zeros(len(forest), bool), np.zeros(len(batch), np.int64), Purpose.FIXED)

    def nothing_to_verify(self) -> None:
        """Replace `plan_verify` in a step without pending proposals."""
        with self.lock:
            self._controller.nothing_to_verify()

    def plan_draft(self, batch: Batch) -> DraftPlan:
        with self.lock:
            self._available.resume_those_due()
            if not self._controller.compares_arms:
                self.arms.forget_all()
            try:
                plan = self._controller.plan_draft(batch)
            except Exception as error:
                self.failed(error, "the choice of drafters", self.request_names)
                return self._no_drafts(batch)
            self._decided = batch, plan, self.request_names
            return plan

    @property
    def fed_blocks(self) -> Bools:
        """(D,): block drafters that are fed in this step, with or without a proposal."""
        return self._controller.fed_blocks

    def observe(self, finished: FinishedStep) -> None:
        outcome = finished.outcome
        with self.lock:
            try:
                if finished.adapters is not None:
                    self.adapters.observe(finished.adapters, outcome)
                self._controller.observe(outcome)
                if self._controller.credits is not None:
                    self.arms.add(finished.step.names, self._controller.credits)
                if self._calibrator is not None:
                    self._calibrator.observe(outcome.forest, outcome.tried, outcome.accepted)
            except Exception as error:
                self.failed(error, "the observation of a step", finished.step.names)
        for listener in self.listeners:
            listener(finished)

    @property
    def calibration(self) -> Calibration | None:
        """Calibration of the drafters' confidences, for a worker that compares proposals; None for any other."""
        return None if self._calibrator is None else self._calibrator.current

    def release(self, slots: Ints) -> None:
        """Forget the requests in these slots, which ended and whose steps were all observed."""
        with self.lock:
            try:
                self._controller.release(slots)
            except Exception as error:
                self.failed(error, f"the release of slots {slots.tolist()}")

    def caught_up(self, tokens: int, seconds: float) -> None:
        """Count the tokens and seconds of draft models that filled KV gaps."""
        with self.lock:
            self.caught_up_tokens += tokens
            self.catch_up_s += seconds

    # -- drafters come and go -----------------------------------------------------------------------------------

    def drafter_failed(self, drafter: str, reason: str) -> None:
        """Suspend a drafter after an error, longer each time; requests go on without it."""
        with self.lock:
            if self._available.suspend(drafter, reason):
                self.arms.failed(drafter)

    def failed(self, error: Exception, part: str = "the bookkeeping", requests: Sequence[str] = ()) -> None:
        """Count an exception in the loop, whose step goes on without drafts. MOST_FAILURES of them within
        FAILURES_WITHIN_S suspend all drafters. part, requests: what raised, and the requests of its step."""
        with self.lock:
            self.failures += 1
            self.arms.forget_all()  # what a step cost may be lost, and its tokens are not
            reason = f"{type(error).__name__}: {error}"
            if reason != self._last_failure or self._available.has_serving_drafter:  # else it comes with every step
                some = f" (requests {', '.join(requests[:MOST_NAMES])})" if requests else ""
                logger.error("outrider: %s raised%s; the step goes on without it", part, some, exc_info=error)
            self._last_failure = reason
            self._failed_at.append(self._clock())
            if len(self._failed_at) == MOST_FAILURES and self._failed_at[-1] - self._failed_at[0] < FAILURES_WITHIN_S:
                self._available.suspend_all(f"the control loop raised {reason}")

    def resume(self, drafter: str) -> None:
        """End a suspension now."""
        with self.lock:
            self._available.resume(drafter)

    # -- what changes while serving -----------------------------------------------------------------------------

    def config_problem(self, hot: HotConfig) -> str:
        """Return why this pod cannot use the hot config, in a sentence; empty if it can."""
        names = [drafter.name for drafter in self.boot.draft_pool]
        return "" if hot.canary is None else canary_problem(hot.canary, names)

    def configure(self, hot: HotConfig) -> None:
        """Put a hot config in force, from the next decision on. Raises UnusableConfigError."""
        problem = self.config_problem(hot)
        if problem:
            raise UnusableConfigError(problem)
        settings = hot_settings(hot)
        with self.lock:
            self.arms.configure(hot.canary)
            self._controller.configure(settings)
            self._available.pause(frozenset(hot.paused_drafters or ()))
            self.slo.configure(hot.slo_classes, hot.default_slo_class)
            self._patience_s = {slo_class.name: patience_s(slo_class) for slo_class in settings.slo_classes}
            self._tpot_s = {slo_class.name: slo_class.tpot_s for slo_class in settings.slo_classes}
            self.class_names = tuple(self._patience_s)

    @property
    def has_slo_classes(self) -> bool:
        return bool(self._patience_s)

    def patience_s(self, slo_class: str | None) -> float:
        """Return how long a request of this class may wait; without a class, as long as the most patient class."""
        return self._patience_s.get(slo_class or "", max(self._patience_s.values(), default=0.0))

    def tpot_s(self, slo_class: str | None) -> float:
        """Return the largest TPOT that this class tolerates; infinite without a class."""
        return self._tpot_s.get(slo_class or "", math.inf)

    def replace_latency(self, latency: LatencyModel | None) -> None:
        with self.lock:
            self._controller.replace_latency(latency)

    def pin(self, draft_tokens: int | None, drafter: str | None = None, width: int = 1) -> None:
        """Fix the draft length, the drafter and its trees' width (profiler, benchmarks); None releases the pin."""
        with self.lock:
            self._controller.pin(draft_tokens, drafter, width)

    # -- reports ------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return the controller's state. `State.tally` is live: read it under `lock`."""
        with self.lock:
            return self._controller.state(self._clock())

    def last_decision(self) -> Decision | None:
        """Return the last decision since the previous call, with the costs and gains that it weighed; None: none."""
        with self.lock:
            decided, self._decided = self._decided, None
            if decided is None:
                return None
            batch, plan, requests = decided
            return Decision(batch, plan, self._controller.weighed(batch), requests)

    # -- inside -------------------------------------------------------------------------------------------------

    def _no_drafts(self, batch: Batch) -> DraftPlan:
        drafter_order = np.full((1, len(batch)), NO_DRAFTER, np.int64)
        passes = np.zeros(len(self.hosted), np.int64)
        return DraftPlan(passes, np.ones_like(passes), drafter_order, np.zeros_like(batch.missing), Purpose.FIXED)


def hot_settings(hot: HotConfig) -> HotSettings:
    """Convert the mounted hot config to the controller's settings."""
    return HotSettings(
        mode=Mode(hot.mode.value),
        draft_prefill=DraftPrefill(hot.draft_prefill.value),
        max_draft_tokens=hot.max_draft_tokens,
        slo_classes=tuple(
            SLOClass(slo.name, seconds(slo.tpot), seconds(slo.ttft) if slo.ttft else None) for slo in hot.slo_classes
        ),
        order=tuple(hot.drafter_order or ()),
        arms=None if hot.canary is None else (frozenset(hot.canary.stable), frozenset(hot.canary.candidate)),
        attempt="" if hot.canary is None else hot.canary.id,
    )
