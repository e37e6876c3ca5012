"""The entry point: two decisions a step, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Set

import numpy as np

from outrider_runtime.control.batch import Batch, DraftPlan, StepOutcome, VerifyPlan
from outrider_runtime.control.costs import LatencyModel
from outrider_runtime.control.counters import ControllerSnapshot
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.planning import Planner
from outrider_runtime.control.report import snapshot
from outrider_runtime.control.roster import Roster
from outrider_runtime.control.settings import HotSettings, Settings


class Controller:
    """One per engine. Not thread-safe: call it from the scheduler's thread, `snapshot` and `configure` included
    (another thread hands its change over and the scheduler applies it between two steps)."""

    def __init__(
        self,
        settings: Settings,
        latency: LatencyModel | None,
        *,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        """`latency` None: learn every cost from the engine's own steps. `clock` times the decisions themselves
        (time.perf_counter); all other times come in with `Batch.now` and `StepOutcome.now`. `rng` spreads probes and
        exploration, so that they do not fall into step with periodic traffic."""
        self.settings = settings
        self._clock = clock
        self._roster = Roster(settings)
        self._evidence = Evidence(settings, latency, rng)
        self._planner = Planner(self._roster, self._evidence)
        self._decision_s = 0.0

    def plan_verify(self, batch: Batch) -> VerifyPlan:
        """Verification lengths for the proposals that wait; call before the engine schedules the step."""
        started = self._clock()
        plan = self._planner.verify(batch)
        self._decision_s += self._clock() - started
        return plan

    def plan_draft(self, batch: Batch) -> DraftPlan:
        """What to propose at the end of the step that the engine has just scheduled."""
        started = self._clock()
        plan = self._planner.draft(batch)
        self._decision_s += self._clock() - started
        return plan

    def plan_plain(self, names: Set[str]) -> DraftPlan | None:
        """`plan_draft` for requests that all decode and verify nothing, told by their names alone, where nothing is
        proposed to any of them once more. None: `plan_draft` has to look at them."""
        started = self._clock()
        plan = self._planner.plain(names)
        self._decision_s += self._clock() - started
        return plan

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step, by the next choice at the latest. Absurd times (NaN, negative, a suspended
        machine) are dropped and counted."""
        self._evidence.observe(outcome)

    def configure(self, hot: HotSettings) -> None:
        """Put new settings in force from the next decision on; what was learned stays."""
        self._roster.configure(hot)
        self._planner.rethink()

    def replace_latency(self, latency: LatencyModel | None) -> None:
        """A profile was loaded or changed; online corrections start anew."""
        self._evidence.replace_latency(latency)
        self._planner.rethink()

    def forget(self, request_id: str) -> None:
        """The request has finished or was aborted; unknown ids are fine."""
        self._evidence.forget(request_id)

    def suspend(self, drafter: str, reason: str) -> None:
        """Use this drafter no more (it failed to load, raised, proposed nonsense); `resume` lifts it."""
        self._roster.suspend(drafter, reason)
        self._planner.rethink()

    def resume(self, drafter: str) -> None:
        """Lift a suspension; evidence from before it has aged meanwhile."""
        self._roster.resume(drafter)

    def pin(self, draft_tokens: int | None, drafter: str | None = None) -> None:
        """Hold K and the drafter (profiler, benchmarks); None for `draft_tokens` releases the pin.

        Pinned to 0 the neural draft does not run at all. Raises ValueError for an unknown drafter or a length that
        the engine was not built for.
        """
        self._roster.pin(draft_tokens, drafter)

    def snapshot(self, now: float | None = None) -> ControllerSnapshot:
        """Everything the state endpoint tells about the loop. `now`, if given, tells an idle engine from a busy one."""
        return snapshot(self._evidence, self._roster, gated=self._planner.gated, decision_s=self._decision_s, now=now)
