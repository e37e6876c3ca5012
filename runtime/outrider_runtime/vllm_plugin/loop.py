"""The control loop of one engine: the controller behind a lock, with what only the engine's side counts.

The scheduler's thread plans and observes; the reporter's thread reconfigures and takes snapshots. Nothing here
imports vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Set
from threading import Lock

import numpy as np
from outrider_crds.base import seconds
from outrider_crds.runtime_config import HotConfig

from outrider_runtime.control.batch import Batch, DraftPlan, Purpose, StepOutcome, VerifyPlan
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.costs import LatencyModel
from outrider_runtime.control.counters import ControllerSnapshot
from outrider_runtime.control.settings import DraftPrefill, HotSettings, Mode, Settings, SLOTarget
from outrider_runtime.drafters import drafter_spec
from outrider_runtime.vllm_plugin.launch import LaunchPlan
from outrider_runtime.vllm_plugin.messages import IDLE, NOBODY, DraftOrder, idle_order, numbers
from outrider_runtime.vllm_plugin.slo import SLOCounter
from outrider_runtime.vllm_plugin.waiting import patience_s

logger = logging.getLogger("vllm.outrider")  # vLLM configures handlers for its own name only

FIRST_SUSPENSION_S = 30.0
LONGEST_SUSPENSION_S = 600.0


class ControlLoop:
    def __init__(
        self,
        plan: LaunchPlan,
        *,
        largest_graph_tokens: int | None,
        left_out: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        """left_out: drafter of the pool -> why the worker could not load it."""
        self.plan = plan
        self.dropped = {**plan.pool.dropped, **(left_out or {})}
        """Drafter -> why it is not hosted."""
        self.numbers = {drafter.name: number for number, drafter in enumerate(plan.pool.hosted)}
        """Drafter -> what it is called between scheduler and worker."""
        self.slo = SLOCounter()
        self.listeners: list[Callable[[StepOutcome], None]] = []
        """Called with each finished step, from the scheduler's thread (the profiler measures through this)."""
        self._clock = clock
        self._lock = Lock()
        self._suspended_until: dict[str, float] = {}
        self._suspensions: dict[str, int] = {}
        self._patience_s: dict[str, float] = {}
        drafters = tuple(drafter_spec(one) for one in plan.pool.hosted if one.name not in self.dropped)
        self._drafters = [drafter.name for drafter in drafters]
        self._neural = [drafter.name for drafter in drafters if drafter.neural]
        settings = Settings(
            drafters=drafters,
            max_draft_tokens=plan.boot.max_draft_tokens,
            largest_graph_tokens=largest_graph_tokens,
            hot=hot_settings(plan.hot),
        )
        rng = np.random.default_rng(seed)
        self._controller = Controller(settings, None, clock=time.perf_counter, rng=rng)
        self.configure(plan.hot)

    def plan_verify(self, batch: Batch) -> VerifyPlan:
        with self._lock:
            try:
                return self._controller.plan_verify(batch)
            except Exception as error:
                self._controller_failed(error)
                return VerifyPlan((0,) * len(batch.requests), Purpose.FIXED)

    def plan_plain(self, names: Set[str]) -> DraftPlan | None:
        """See `Controller.plan_plain`."""
        with self._lock:
            self._resume_due()
            try:
                return self._controller.plan_plain(names)
            except Exception as error:
                self._controller_failed(error)
                return None

    def plan_draft(self, batch: Batch) -> tuple[DraftPlan, DraftOrder]:
        """The controller's plan, and the same as the worker needs it."""
        with self._lock:
            self._resume_due()
            try:
                plan = self._controller.plan_draft(batch)
            except Exception as error:
                self._controller_failed(error)
                plan = DraftPlan(0, (None,) * len(batch.requests), False, False, 0, Purpose.FIXED)
        return plan, self.order(batch, plan)

    def observe(self, outcome: StepOutcome) -> None:
        with self._lock:
            try:
                self._controller.observe(outcome)
            except Exception as error:
                self._controller_failed(error)
        for listener in self.listeners:
            listener(outcome)

    def forget(self, request_id: str) -> None:
        with self._lock:
            try:
                self._controller.forget(request_id)
            except Exception as error:
                self._controller_failed(error)

    def drafter_failed(self, drafter: str, reason: str) -> None:
        """Use `drafter` no more for a while, longer each time; requests go on without it."""
        with self._lock:
            self._suspend(drafter, reason)

    def resume(self, drafter: str) -> None:
        """Lift a suspension now."""
        with self._lock:
            self._suspended_until.pop(drafter, None)
            self._controller.resume(drafter)

    def configure(self, hot: HotConfig) -> None:
        """Put a hot config in force; takes effect with the next decision."""
        settings = hot_settings(hot)
        with self._lock:
            self._controller.configure(settings)
            self.slo.configure(hot.slo_classes, hot.default_slo_class)
            self._patience_s = {one.name: patience_s(one) for one in settings.slo_classes}

    @property
    def has_slo_classes(self) -> bool:
        return bool(self._patience_s)

    def patience_s(self, slo_class: str | None) -> float:
        """How long a request of this class may wait; one without a class is as patient as the most patient class."""
        return self._patience_s.get(slo_class or "", max(self._patience_s.values(), default=0.0))

    def replace_latency(self, latency: LatencyModel | None) -> None:
        with self._lock:
            self._controller.replace_latency(latency)

    def pin(self, draft_tokens: int | None, drafter: str | None = None) -> None:
        """Hold K and the drafter (profiler, benchmarks); None releases the pin."""
        with self._lock:
            self._controller.pin(draft_tokens, drafter)

    def snapshot(self) -> ControllerSnapshot:
        with self._lock:
            return self._controller.snapshot(self._clock())

    def _controller_failed(self, error: Exception) -> None:
        """A bug of the controller's costs users their speculation for a while, not their answers."""
        if not set(self._drafters) <= self._suspended_until.keys():
            logger.error("outrider: the controller raised; nothing is proposed for a while", exc_info=error)
        for drafter in self._drafters:
            self._suspend(drafter, f"the controller raised {type(error).__name__}: {error}")

    def _suspend(self, drafter: str, reason: str) -> None:
        if drafter in self._suspended_until:
            return  # a step that was under way when the first failure came in
        again = self._suspensions.get(drafter, 0)
        pause_s = min(LONGEST_SUSPENSION_S, FIRST_SUSPENSION_S * 2**again)
        self._suspensions[drafter] = again + 1
        self._suspended_until[drafter] = self._clock() + pause_s
        self._controller.suspend(drafter, f"suspended for {pause_s:.0f} s: {reason}")

    def _resume_due(self) -> None:
        if not self._suspended_until:
            return
        now = self._clock()
        for drafter in [name for name, until in self._suspended_until.items() if now >= until]:
            del self._suspended_until[drafter]
            self._controller.resume(drafter)

    def draft_tokens(self, plan: DraftPlan, drafter: str) -> int:
        """How many tokens `plan` asks of `drafter` for a request."""
        return plan.neural_tokens if drafter in self._neural else plan.draft_tokens

    def idle_order(self, requests: int) -> DraftOrder:
        return idle_order(len(self.numbers), requests)

    def order(self, batch: Batch, plan: DraftPlan) -> DraftOrder:
        """`plan` as the worker needs it."""
        order = self.idle_order(len(batch.requests))
        if plan.draft_tokens:
            order.chosen[:] = [NOBODY if name is None else self.numbers[name] for name in plan.drafters]
        for name, number in self.numbers.items():
            if name in self._neural:
                order.passes[number] = plan.neural_tokens if plan.run_neural else IDLE
            elif (order.chosen == number).any():
                order.passes[number] = plan.draft_tokens
        if plan.neural_tokens and self._neural:
            number = self.numbers[self._neural[0]]
            ready = numbers([view.draft_ready for view in batch.requests]) == 1
            order.second[ready & (order.chosen != NOBODY) & (order.chosen != number)] = number
        return order._replace(draft_tokens=plan.draft_tokens)


def hot_settings(hot: HotConfig) -> HotSettings:
    """The controller's form of the mounted hot config."""
    return HotSettings(
        mode=Mode(hot.mode.value),
        draft_prefill=DraftPrefill(hot.draft_prefill.value),
        max_draft_tokens=hot.max_draft_tokens,
        slo_classes=tuple(
            SLOTarget(one.name, seconds(one.tpot), seconds(one.ttft) if one.ttft else None) for one in hot.slo_classes
        ),
    )
