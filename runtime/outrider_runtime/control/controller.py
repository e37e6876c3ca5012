"""The entry point: two decisions a step, and what came of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outrider_runtime.control.batch import Batch, DraftPlan, StepOutcome, VerifyPlan
from outrider_runtime.control.costs import LatencyModel
from outrider_runtime.control.counters import ControllerSnapshot
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
        (time.perf_counter); all other times come in with `Batch.now` and `StepOutcome.now`."""
        raise NotImplementedError

    def plan_verify(self, batch: Batch) -> VerifyPlan:
        """Verification lengths for the proposals that wait; call before the engine schedules the step."""
        raise NotImplementedError

    def plan_draft(self, batch: Batch) -> DraftPlan:
        """What to propose at the end of the step that the engine has just scheduled."""
        raise NotImplementedError

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step. Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        raise NotImplementedError

    def configure(self, hot: HotSettings) -> None:
        """Put new settings in force from the next decision on; what was learned stays."""
        raise NotImplementedError

    def replace_latency(self, latency: LatencyModel | None) -> None:
        """A profile was loaded or changed; online corrections start anew."""
        raise NotImplementedError

    def forget(self, request_id: str) -> None:
        """The request has finished or was aborted; unknown ids are fine."""
        raise NotImplementedError

    def suspend(self, drafter: str, reason: str) -> None:
        """Use this drafter no more (it failed to load, raised, proposed nonsense); `resume` lifts it."""
        raise NotImplementedError

    def resume(self, drafter: str) -> None:
        """Lift a suspension; evidence from before it has aged meanwhile."""
        raise NotImplementedError

    def pin(self, draft_tokens: int | None, drafter: str | None = None) -> None:
        """Hold K and the drafter (profiler, benchmarks); None for `draft_tokens` releases the pin.

        Pinned to 0 the neural draft does not run at all. Raises ValueError for an unknown drafter.
        """
        raise NotImplementedError

    def snapshot(self) -> ControllerSnapshot:
        """Everything the state endpoint tells about the loop."""
        raise NotImplementedError
