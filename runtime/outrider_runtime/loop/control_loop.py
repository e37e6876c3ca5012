"""The control loop of one engine: the controller behind a lock, with what only the engine's side counts.

The scheduler's thread plans and observes; the reporter's thread reconfigures and reads the state.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from threading import RLock

import numpy as np
from outrider_crds.base import seconds
from outrider_crds.runtime_config import BootConfig, HotConfig
from outrider_crds.spec import Drafter

from outrider_runtime.control.controller import Controller
from outrider_runtime.control.cost.model import LatencyModel
from outrider_runtime.control.data.batch import NOBODY, Batch, Bools, Ints
from outrider_runtime.control.data.forest import Forest
from outrider_runtime.control.data.plans import DraftPlan, Purpose, VerifyPlan
from outrider_runtime.control.settings import DraftPrefill, HotSettings, Mode, Settings, SLOClass
from outrider_runtime.control.state import RECENT_KEEP, State, Weighed
from outrider_runtime.drafters import traits
from outrider_runtime.drafters.block import BlockCheckpoint
from outrider_runtime.loop.arm_counts import ArmCounter, canary_problem
from outrider_runtime.loop.confidences import Calibration, Calibrator
from outrider_runtime.loop.drafter_availability import Availability
from outrider_runtime.loop.slo_accounting import SLOCounter
from outrider_runtime.loop.slots import SLOTS_PER_REQUEST
from outrider_runtime.loop.steps import FinishedStep
from outrider_runtime.loop.waiting import patience_s

logger = logging.getLogger("vllm.outrider")  # vLLM configures handlers for its own name only


class UnusableConfigError(ValueError):
    """A hot config that does not fit this pod; the one before it stays in force."""


class ControlLoop:
    def __init__(
        self, boot: BootConfig, hot: HotConfig, hosted: Sequence[Drafter], *, max_requests: int,
        left_out: Mapping[str, str] | None = None, largest_graph_tokens: int | None = None,
        page_tokens: int = 1, widest: int = 1, scores_placeholders: bool = False, device_ranks: bool = False,
        blocks: Mapping[str, BlockCheckpoint] | None = None, clock: Callable[[], float] = time.monotonic, seed: int = 0,
    ) -> None:  # fmt: skip
        """hosted: drafters of the pool that the engine was started with; their places are their numbers. left_out:
        drafter -> why it is not hosted, or was not loaded. max_requests: that run at once. page_tokens: in a page of
        the engine's KV cache. widest: nodes at a depth of the trees that the engine verifies; 1: chains.
        scores_placeholders, device_ranks: see `Settings`. blocks: what is known of block drafters, by
        name."""
        self.boot = boot
        self.hosted = tuple(hosted)
        self.numbers = {drafter.name: number for number, drafter in enumerate(self.hosted)}
        self.left_out = dict(left_out or {})
        self.blocks = dict(blocks or {})
        self.slo = SLOCounter()
        self.listeners: list[Callable[[FinishedStep], None]] = []
        """Called with each finished step, from the scheduler's thread (the profiler measures through this)."""
        self.places: int | None = None
        """The profiler's: so many tokens of each request may be held to be verified, and whatever is held is, whether
        anybody proposed it or not. None: what was proposed, as far as it pays."""
        self.lock = RLock()
        self.failures = 0
        """Times that a decision, or the books about steps and requests, raised."""
        self._last_failure = ""
        self.running = 0
        """Requests that the engine runs; the stepper says."""
        self.caught_up_tokens = 0
        self.catch_up_s = 0.0
        self._used = np.zeros(len(hosted))
        """(D,): requests that verified a drafter's proposals, over the last steps."""
        self._decided: tuple[Batch, DraftPlan] | None = None
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
        self._calibrator = Calibrator(len(hosted), max(1, boot.max_draft_tokens)) if device_ranks else None
        rng = np.random.default_rng(seed)
        self.arms = ArmCounter(rng)
        self._controller = Controller(self.settings, None, clock=time.perf_counter, rng=rng)
        self._available = Availability(self._controller, self.numbers, self.left_out, clock)
        self.configure(hot if self.config_problem(hot) == "" else hot.model_copy(update={"canary": None}))

    # -- what an engine calls at every step ---------------------------------------------------------------------

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        with self.lock:
            try:
                return self._controller.plan_verify(batch, forest)
            except Exception as error:
                self.failed(error)
                return VerifyPlan(np.zeros(len(forest), bool), np.zeros(len(batch), np.int64), Purpose.FIXED)

    def nothing_to_verify(self) -> None:
        """Replace `plan_verify` where nothing waits."""
        with self.lock:
            self._controller.nothing_to_verify()

    def plan_draft(self, batch: Batch) -> DraftPlan:
        with self.lock:
            self._available.resume_those_due()
            try:
                plan = self._controller.plan_draft(batch)
            except Exception as error:
                self.failed(error)
                return self._nothing(batch)
            self._decided = batch, plan
            return plan

    @property
    def fed_blocks(self) -> Bools:
        """(D,): block drafters that are fed in this step, whatever is proposed."""
        return self._controller.fed_blocks

    def observe(self, told: FinishedStep) -> None:
        with self.lock:
            try:
                self._controller.observe(told.outcome)
                if self._controller.credits is not None:
                    self.arms.add(told.step.names, self._controller.credits)
                if self._calibrator is not None:
                    self._calibrator.observe(told.outcome.forest, told.outcome.tried, told.outcome.accepted)
                self._count_users(told)
            except Exception as error:
                self.failed(error)
        for listener in self.listeners:
            listener(told)

    @property
    def calibration(self) -> Calibration | None:
        """What the drafters' confidences are worth to a device that ranks by them; None where it does not."""
        return None if self._calibrator is None else self._calibrator.current

    def release(self, slots: Ints) -> None:
        """The requests in these slots have ended, and every step of theirs was observed."""
        with self.lock:
            try:
                self._controller.release(slots)
            except Exception as error:
                self.failed(error)

    def caught_up(self, tokens: int, seconds: float) -> None:
        """Draft models ran over so many tokens to close holes in their caches."""
        with self.lock:
            self.caught_up_tokens += tokens
            self.catch_up_s += seconds

    # -- drafters come and go -----------------------------------------------------------------------------------

    def drafter_failed(self, drafter: str, reason: str) -> None:
        """Use `drafter` no more for a while, longer each time; requests go on without it."""
        with self.lock:
            if self._available.suspend(drafter, reason):
                self.arms.failed(drafter)

    def failed(self, error: Exception) -> None:
        """The loop raised: that costs users their speculation for a while, not their answers."""
        with self.lock:
            self.failures += 1
            reason = f"{type(error).__name__}: {error}"
            # One that comes with every step would drown the log.
            if reason != self._last_failure or self._available.is_anybody_left:
                logger.error("outrider: the control loop raised; nothing is proposed for a while", exc_info=error)
            self._last_failure = reason
            self._available.suspend_all(f"the control loop raised {reason}")

    def resume(self, drafter: str) -> None:
        """Lift a suspension now."""
        with self.lock:
            self._available.resume(drafter)

    # -- what changes while serving -----------------------------------------------------------------------------

    def config_problem(self, hot: HotConfig) -> str:
        """Why this pod cannot use the hot config, in a sentence; empty where it can."""
        names = [drafter.name for drafter in self.boot.draft_pool]
        return "" if hot.canary is None else canary_problem(hot.canary, names)

    def configure(self, hot: HotConfig) -> None:
        """Put a hot config in force; takes effect with the next decision. Raises UnusableConfigError."""
        problem = self.config_problem(hot)
        if problem:
            raise UnusableConfigError(problem)
        settings = hot_settings(hot)
        with self.lock:
            self.arms.configure(hot.canary)
            self._controller.configure(settings)
            self._available.pause(frozenset(hot.paused_drafters or ()))
            self.slo.configure(hot.slo_classes, hot.default_slo_class)
            self._patience_s = {one.name: patience_s(one) for one in settings.slo_classes}
            self._tpot_s = {one.name: one.tpot_s for one in settings.slo_classes}
            self.class_names = tuple(self._patience_s)

    @property
    def has_slo_classes(self) -> bool:
        return bool(self._patience_s)

    def patience_s(self, slo_class: str | None) -> float:
        """How long a request of this class may wait; one without a class is as patient as the most patient class."""
        return self._patience_s.get(slo_class or "", max(self._patience_s.values(), default=0.0))

    def tpot_s(self, slo_class: str | None) -> float:
        """What a request of this class bears; one without a class bears anything."""
        return self._tpot_s.get(slo_class or "", math.inf)

    def replace_latency(self, latency: LatencyModel | None) -> None:
        with self.lock:
            self._controller.replace_latency(latency)

    def pin(self, draft_tokens: int | None, drafter: str | None = None, width: int = 1) -> None:
        """Hold K, the drafter and its trees' width (profiler, benchmarks); None releases the pin."""
        with self.lock:
            self._controller.pin(draft_tokens, drafter, width)

    # -- what is told of it -------------------------------------------------------------------------------------

    def state(self) -> State:
        """`State.tally` is a live one: read it under `lock`."""
        with self.lock:
            return self._controller.state(self._clock())

    def last_decision(self) -> tuple[Batch, DraftPlan, Weighed | None] | None:
        """What was decided since the last call, if anything was, and what it hung on."""
        with self.lock:
            decided, self._decided = self._decided, None
            return None if decided is None else (*decided, self._controller.weighed(decided[0]))

    @property
    def favourite(self) -> str:
        """The drafter that most requests of the last steps used; empty for none."""
        if not len(self._used) or self._used.max() <= 0.05:
            return ""
        return self.hosted[int(self._used.argmax())].name

    # -- inside -------------------------------------------------------------------------------------------------

    def _count_users(self, told: FinishedStep) -> None:
        forest = told.outcome.forest
        first = told.outcome.verified & (forest.depth == 1) & (forest.rank == 0)
        users = np.bincount(forest.drafter[first], minlength=len(self._used))
        self._used += (1 - RECENT_KEEP) * (users - self._used)

    def _nothing(self, batch: Batch) -> DraftPlan:
        asked = np.full((1, len(batch)), NOBODY, np.int64)
        passes = np.zeros(len(self.hosted), np.int64)
        return DraftPlan(passes, np.ones_like(passes), asked, np.zeros_like(batch.missing), Purpose.FIXED)


def hot_settings(hot: HotConfig) -> HotSettings:
    """The controller's form of the mounted hot config."""
    return HotSettings(
        mode=Mode(hot.mode.value),
        draft_prefill=DraftPrefill(hot.draft_prefill.value),
        max_draft_tokens=hot.max_draft_tokens,
        slo_classes=tuple(
            SLOClass(one.name, seconds(one.tpot), seconds(one.ttft) if one.ttft else None) for one in hot.slo_classes
        ),
        order=tuple(hot.drafter_order or ()),
        arms=None if hot.canary is None else (frozenset(hot.canary.stable), frozenset(hot.canary.candidate)),
    )
