"""The entry point: an engine asks for two decisions per step, and reports what came of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from outrider_runtime.control.arm_plans import ArmPlanner, can_compare
from outrider_runtime.control.arm_prices import Credits
from outrider_runtime.control.batch import NO_DRAFTER, Batch, Bools, Ints
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.plans import DraftPlan, Forest, Outcome, VerifyPlan
from outrider_runtime.control.propose import Propose
from outrider_runtime.control.settings import HotSettings, Mode, Pin, Settings, fed_blocks, in_force
from outrider_runtime.control.slo import UnderWay
from outrider_runtime.control.state import (
    ACCEPTED,
    IDLE_S,
    LEAST_PROBES,
    LEAST_STEPS,
    REQUEST_STEPS,
    TRIED,
    VERIFIED,
    DrafterState,
    Reason,
    State,
    Weighed,
)
from outrider_runtime.control.step_times import LatencyModel
from outrider_runtime.control.verify import Verify


class Controller:
    """One per engine. Not thread-safe: callers hold a lock (`loop.ControlLoop.lock`)."""

    def __init__(
        self,
        settings: Settings,
        latency: LatencyModel | None,
        *,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        """latency: None: learn every cost from the engine's own steps. clock: times the decisions themselves
        (time.perf_counter); all other times come from `Batch.now_s` and `Outcome.output_at_s`. rng: spreads trials, so
        that they do not coincide with periodic traffic.
        """
        self.settings = settings
        self._clock, self._rng = clock, rng
        self._evidence = Evidence(settings, latency, rng)
        self._suspended: dict[int, str] = {}
        self._pinned: Pin | None = None
        self._force = in_force(settings, self._suspended, None)
        self._under_way = UnderWay(np.zeros(settings.slots))
        self._verify = Verify(self._evidence, self._force, self._under_way, device_ranks=settings.device_ranks)
        self._propose = Propose(settings, self._evidence, self._force, self._under_way)
        self._decision_s = 0.0
        self._arms: ArmPlanner | None = None
        self.credits: Credits | None = None
        """Tokens and cost of each request in the last observed step; None without a canary."""
        self.compares_arms = False
        """Decisions from now on show which arm is better, see `can_compare`."""
        self.fed_blocks: Bools
        """(D,): see `settings.fed_blocks`."""
        self._settle()

    # -- what an engine calls at every step ---------------------------------------------------------------------

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        """Choose which waiting proposals the target scores. Call it before the engine schedules the step."""
        started = self._clock()
        plan = None if self._arms is None or batch.arm is None else self._arms.plan_verify(batch, forest)
        plan = plan or self._verify.plan(batch, forest)
        self._decision_s += self._clock() - started
        return plan

    def nothing_to_verify(self) -> None:
        """Call it in place of `plan_verify` if no proposal waits and no request may be held back."""
        self._under_way.verifies_nothing()

    def plan_draft(self, batch: Batch) -> DraftPlan:
        """Choose what to propose at the end of the step that the engine has just scheduled."""
        started = self._clock()
        arms = None if batch.arm is None else self._arms
        plan = self._propose.plan(batch) if arms is None else arms.plan_draft(batch)
        self._decision_s += self._clock() - started
        return plan

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step. Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        started = self._clock()
        self._evidence.observe(outcome)
        self.credits = None if self._arms is None else self._arms.observe(outcome)
        self._decision_s += self._clock() - started

    def release(self, slots: Ints) -> None:
        """Forget the requests in these slots, which have ended. Call it after their last `observe`."""
        self._evidence.acceptance.release(slots)
        self._under_way.expected[slots] = 0.0

    # -- what changes while serving -----------------------------------------------------------------------------

    def configure(self, hot: HotSettings) -> None:
        """Put new settings in force from the next decision on. What was learned is kept."""
        if (hot.arms, hot.attempt) != (self.settings.hot.arms, self.settings.hot.attempt):
            self._arms = None
        self.settings = dataclasses.replace(self.settings, hot=hot)
        self._settle()

    def replace_latency(self, latency: LatencyModel | None) -> None:
        """Use a profile that was loaded or changed; its online corrections start again. None: learn every cost."""
        self._evidence.replace_latency(latency)

    def suspend(self, drafter: str, reason: str) -> None:
        """Keep a drafter from running until `resume`. Raises ValueError for a drafter that is not in the pool."""
        self._suspended[self._number(drafter)] = reason
        self._settle()

    def resume(self, drafter: str) -> None:
        self._suspended.pop(self._number(drafter), None)
        self._settle()

    def pin(self, draft_tokens: int | None, drafter: str | None = None, width: int = 1) -> None:
        """Give every request trees of this depth and width by one drafter, and verify all of them. None: choose again.
        Depth 0 feeds a block drafter and proposes nothing.

        Raises ValueError for an unknown drafter, or a depth or width that engine or drafter was not built for.
        """
        if draft_tokens is None:
            self._pinned = None
        elif not 0 <= draft_tokens <= self.settings.max_draft_tokens:
            raise ValueError(f"pin: {draft_tokens} draft tokens; the engine takes 0..{self.settings.max_draft_tokens}")
        else:
            self._pinned = self._pin(draft_tokens, drafter, width)
        self._settle()

    def _pin(self, draft_tokens: int, drafter: str | None, width: int) -> Pin:
        if not draft_tokens and drafter is None:
            return Pin(0, NO_DRAFTER, 1)
        number = self._number(drafter)
        if not 1 <= width <= self.settings.drafters[number].widest:
            raise ValueError(f"pin: width {width}; {drafter} takes 1..{self.settings.drafters[number].widest}")
        return Pin(draft_tokens, number, width)

    def state(self, now_s: float | None = None) -> State:
        """The counters. now_s: monotonic seconds, to notice an idle engine; None: assume a busy one."""
        evidence = self._evidence
        drafters = {drafter.name: self._drafter_state(d) for d, drafter in enumerate(self.settings.drafters)}
        return State(
            self._reason(now_s), evidence.latency.learning, self._has_disabled_drafts, evidence.trials.speedup.counts,
            evidence.tally, self._decision_s, drafters,
        )  # fmt: skip

    def _drafter_state(self, drafter: int) -> DrafterState:
        counted = self._evidence.tally.of_drafter[drafter].tolist()
        return DrafterState(
            self._suspended.get(drafter, ""), counted[REQUEST_STEPS], counted[TRIED], counted[VERIFIED],
            counted[ACCEPTED],
        )  # fmt: skip

    def weighed(self, batch: Batch) -> Weighed | None:
        """Estimates that decide about `batch`, the argument of `plan_draft`; None if no request can be drafted for."""
        return self._propose.weighed(batch)

    @property
    def _has_disabled_drafts(self) -> bool:
        return self._propose.has_disabled_drafts if self._arms is None else self._arms.has_disabled_drafts

    def _settle(self) -> None:
        self._force = self._verify.force = in_force(self.settings, self._suspended, self._pinned)
        self._propose.settle(self._force)
        self.fed_blocks = fed_blocks(self.settings, self._force)
        self.compares_arms = can_compare(self.settings, self._force)
        if self.settings.hot.arms is None:
            self._arms = None
            return
        self._arms = self._arms or ArmPlanner(self.settings, self._evidence, self._under_way, self._rng)
        self._arms.settle(self.settings, self._suspended, self._pinned)

    def _number(self, drafter: str | None) -> int:
        names = [entry.name for entry in self.settings.drafters]
        if drafter not in names:
            raise ValueError(f"drafter {drafter!r} is not in the pool {names}")
        return names.index(drafter)

    def _reason(self, now_s: float | None) -> Reason:
        tally = self._evidence.tally
        if self._force.is_silent:
            return Reason.OFF
        if not self._force.usable.any():
            return Reason.NO_DRAFTER
        if tally.steps == 0 or (now_s is not None and now_s - tally.last_step_at > IDLE_S):
            return Reason.NO_TRAFFIC
        if tally.recent_speculation < 0.5:
            return Reason.NOT_WORTH_IT if tally.steps >= LEAST_STEPS else Reason.MEASURING
        measured = self._evidence.trials.speedup.counts.probes >= LEAST_PROBES or self.settings.hot.mode is Mode.STATIC
        return Reason.PAYS if measured else Reason.MEASURING
