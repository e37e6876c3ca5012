"""Makes a whole profile: chooses which engines to start and what each measures, and records what failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from outrider_crds.draft_pool import DrafterSpec, DraftMethod, PromptLookup, SparseSelf
from outrider_crds.long_contexts import SelfDraft, self_draft
from outrider_crds.profile import DrafterProfile, ProfilingFailure, ProfilingResult, TargetProfile
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, HotConfig, draft_mount
from outrider_crds.spec import Backend, DraftPrefillMode, SpeculationMode

from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.drafters import traits
from outrider_runtime.drafters.pool import model_config
from outrider_runtime.identity import weights_commit
from outrider_runtime.paths import Paths
from outrider_runtime.profiler import failures, session
from outrider_runtime.profiler.documents import check_quiet, drafter_profile, fit_drafter, fit_target, target_profile
from outrider_runtime.profiler.engines import ENGINES
from outrider_runtime.profiler.engines.measurable import ProfilerLaunch
from outrider_runtime.profiler.failures import ProfilingError, failure
from outrider_runtime.profiler.fitting import FittedCost
from outrider_runtime.profiler.host_protocol import Ready, VisitOrder
from outrider_runtime.profiler.remote import RemoteEngine, engine
from outrider_runtime.profiler.step_samples import Visit

DEFAULT_DRAFTER = DrafterSpec(name="outrider", method=DraftMethod.PROMPT_LOOKUP, prompt_lookup=PromptLookup())
"""Drafter for measuring a target without a pool: verifying is part of the target's cost, and a drafter may be added
later."""

StartEngine = Callable[[Backend, ProfilerLaunch], AbstractContextManager[RemoteEngine]]
Say = Callable[[str], None]
"""Prints a line about the progress."""


@dataclass(frozen=True, slots=True)
class ProfilingTask:
    """What the profiler was started to measure."""

    boot: BootConfig
    keys: ProfileKeys
    target: bool
    """Whether to measure the target."""
    drafters: tuple[DrafterSpec, ...]
    """Drafters to measure."""


@dataclass(slots=True)
class Profile:
    """What was measured, and what failed."""

    target: TargetProfile | None = None
    drafters: list[DrafterProfile] = field(default_factory=list)
    failures: list[ProfilingFailure] = field(default_factory=list)
    fitted_target: Mapping[ExecutionMode, FittedCost] = field(default_factory=dict)
    fitted_drafters: dict[str, FittedCost] = field(default_factory=dict)
    """Fits by drafter name. Like `fitted_target` it is for the report, and has fits too noisy for a profile, too."""
    self_drafting: dict[str, tuple[SparseSelf, int]] = field(default_factory=dict)
    """Name of each `SparseSelf` drafter (the target over a window) -> its settings, and the largest draft length."""
    measured_s: float = 0.0
    """Seconds spent on measuring."""

    def self_drafts(self) -> dict[str, SelfDraft]:
        """Return where each `SparseSelf` drafter pays, by name; it takes a profile of the target as well."""
        if self.target is None:
            return {}
        settings = self.self_drafting
        return {
            drafter.name: self_draft(self.target, drafter, *settings[drafter.name])
            for drafter in self.drafters
            if drafter.name in settings
        }

    def result(self) -> ProfilingResult:
        """Return the result that the Job reports."""
        return ProfilingResult(target=self.target, drafters=self.drafters, failures=self.failures)


@dataclass(frozen=True, slots=True)
class EnginePart:
    """The part of a profiling task that one engine measures."""

    target: bool
    drafters: tuple[DrafterSpec, ...]

    @property
    def names(self) -> list[str]:
        """Names of the target and the drafters, as failures have them: the target's is empty."""
        return [""] * self.target + [drafter.name for drafter in self.drafters]

    def select(self, names: Container[str]) -> EnginePart:
        """Return the part whose names are in `names`."""
        return EnginePart(
            self.target and "" in names, tuple(drafter for drafter in self.drafters if drafter.name in names)
        )


def has_weights(drafter: DrafterSpec) -> bool:
    """Whether the engine loads weights for the drafter: its own model, or layers of the target's checkpoint (MTP)."""
    return drafter.neural is not None or drafter.mtp is not None


def separate(part: EnginePart) -> list[EnginePart]:
    """Give every drafter with weights an engine of its own. The target and the other drafters go with the first."""
    lookups = tuple(drafter for drafter in part.drafters if not has_weights(drafter))
    neural = [drafter for drafter in part.drafters if has_weights(drafter)]
    first = EnginePart(part.target, (*lookups, *neural[:1]))
    return [first, *(EnginePart(False, (drafter,)) for drafter in neural[1:])]


class Profiler:
    """Measures everything in one engine, which is set up as for serving. Each drafter runs alone.

    If the engine fails, the rest is measured with another one: one failure does not affect other measurements.
    """

    def __init__(
        self,
        task: ProfilingTask,
        paths: Paths,
        budget_s: float,
        say: Say,
        start: StartEngine = engine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = task
        self._paths = paths
        self._backend = task.boot.engine.backend
        self._budget_left_s = budget_s
        self._say = say
        self._start = start
        self._clock = clock
        self._parts_left = 1
        """Parts that share the rest of the budget."""
        self._current_drafter = ""
        """Drafter that proposes in the shape that is being measured; empty: none."""
        self._profile = Profile()

    def run(self) -> Profile:
        """Measure the whole task. Failures are part of the profile."""
        try:
            target = self._task.boot.target
            model_config(target, self._paths.models.location(target, TARGET_MOUNT))
        except (OSError, ValueError) as error:
            self._fail(failures.MODEL_NOT_FOUND, f"the target cannot be read: {error}")
            return self._profile
        self._measure_parts([EnginePart(self._task.target, self._task.drafters)])
        return self._profile

    def _measure_parts(self, parts: Sequence[EnginePart]) -> None:
        for index, part in enumerate(parts):
            self._parts_left = len(parts) - index
            self._measure_part(part)

    def _measure_part(self, part: EnginePart) -> None:
        launch = self._plan(part)
        self._fail_drafters(part, launch.pool.dropped)
        part = part.select({"", *(drafter.name for drafter in launch.pool.hosted)})
        if part.names:
            self._run_engine(part, launch)

    def _fail_drafters(self, part: EnginePart, reasons: Mapping[str, str]) -> None:
        """Record a failure for each drafter of `part` in `reasons` (drafter -> sentence)."""
        for name, sentence in reasons.items():
            if name in part.names:
                self._fail(failures.classify_obstacle(sentence), sentence, name)

    def _run_engine(self, part: EnginePart, launch: ProfilerLaunch) -> None:
        """Measure `part` with one engine. If a drafter makes that engine fail, measure the rest without it."""
        try:
            self._current_drafter = ""
            self._measure(part, launch)
        except ProfilingError as error:
            self._continue(self._missing(part), self._suspect(part, launch, error), error)

    def _continue(self, rest: EnginePart, suspect: tuple[str, str] | None, error: ProfilingError) -> None:
        """Measure `rest` after an engine failed. suspect: the drafter that caused it, and a sentence; None: unknown."""
        neural = [drafter for drafter in rest.drafters if has_weights(drafter)]
        if suspect is None and len(neural) > 1:  # each of them may be the cause
            self._measure_parts(separate(rest))
        elif suspect is None:
            for name in rest.names:
                self._fail(error.reason, error.message, name)
        else:
            name, cause = suspect
            reason = failures.DRAFTER_FAILED if error.reason == failures.ENGINE_FAILED else error.reason
            self._fail(reason, cause, name)
            rest = rest.select({*rest.names} - {name})
            if rest.names:
                self._measure_part(rest)

    def _suspect(self, part: EnginePart, launch: ProfilerLaunch, error: ProfilingError) -> tuple[str, str] | None:
        """Return the drafter that most likely made the engine fail, and a sentence; None if that is not clear.

        It is the one that the engine names, the one that was running, or the only one with weights.
        """
        named = launch.name_culprits(error)
        neural = [drafter.name for drafter in part.drafters if has_weights(drafter)]
        likely = [name for name in neural if name in named or name == self._current_drafter]
        suspects = likely or neural
        return (suspects[0], named.get(suspects[0], error.message)) if len(suspects) == 1 else None

    def _missing(self, part: EnginePart) -> EnginePart:
        """Return what of `part` is not measured yet."""
        measured = {profile.name for profile in self._profile.drafters}
        measured |= {""} if self._profile.target is not None else set()
        return part.select({*part.names} - measured)

    def _plan(self, part: EnginePart) -> ProfilerLaunch:
        """Plan an engine with the drafters of `part` and, as when it serves, all of the service's without weights."""
        measured = {drafter.name for drafter in part.drafters}
        others = [drafter for drafter in self._task.boot.draft_pool if drafter.name not in measured]
        lookups = [drafter for drafter in others if not has_weights(drafter)]
        pool = [*part.drafters, *lookups] or [DEFAULT_DRAFTER]
        boot = self._task.boot.model_copy(update={"draft_pool": pool})
        hot = HotConfig(
            mode=SpeculationMode.CLOSED_LOOP,
            draft_prefill=DraftPrefillMode.AUTO,
            max_draft_tokens=boot.max_draft_tokens,
        )
        return ENGINES[self._backend].plan(boot, hot, self._paths)

    def _measure(self, part: EnginePart, launch: ProfilerLaunch) -> None:
        """Start the engine and measure. If the engine fails meanwhile, keep what was measured before."""
        if self._budget_left_s <= 0:
            text = f"the time budget was spent before {_part_name(part)} was measured; raise profiling.timeBudget"
            raise ProfilingError(failures.TIME_BUDGET_TOO_SMALL, text)
        self._say(f"starting the engine for {_part_name(part)} (this does not count towards the time budget)")
        began = self._clock()
        with self._start(self._backend, launch) as running:
            ready = running.wait_ready(lambda waited_s: self._say(f"the engine is starting, {waited_s:.0f} s so far"))
            self._say(f"the engine is up after {self._clock() - began:.0f} s on {ready.device}")
            not_loaded = launch.left_out()
            self._fail_drafters(part, not_loaded)
            part = part.select({*part.names} - not_loaded.keys())
            budget = session.Budget(self._budget_left_s / self._parts_left, self._clock(), self._clock)
            series = self._series(part, launch, ready, budget.total_s)
            try:
                session.run(list(series.values()), partial(self._visit, running), budget, self._say)
            except ProfilingError:
                self._keep(part, series, ready, on_failure=lambda *_: None)  # only the engine's failure is reported
                raise
            finally:
                self._profile.measured_s += budget.elapsed_s
                self._budget_left_s -= budget.elapsed_s
            self._keep(part, series, ready, on_failure=self._fail)

    def _visit(self, running: RemoteEngine, order: VisitOrder) -> Visit:
        self._current_drafter = order.drafter or ""
        return running.visit(order)

    def _series(
        self, part: EnginePart, launch: ProfilerLaunch, ready: Ready, budget_s: float
    ) -> dict[str, session.ShapeSeries]:
        """Return the shapes to measure by drafter name; the target's have the empty name.

        One lookup drafter needs no shapes of its own: it runs in the target's steps, and is measured there.
        """
        series: dict[str, session.ShapeSeries] = {}
        lookups = [entry for entry in launch.pool.hosted if not (traits(entry).passes or traits(entry).reads)]
        shared = next(iter(lookups), launch.pool.primary)
        if part.target:
            name = shared.name if shared is not None else None
            series[""] = session.target_series(ready.limits, ready.pace, name, budget_s)
        for drafter in part.drafters:
            known = ready.drafters[drafter.name]
            if known.passes or known.reads or drafter != shared or not part.target:
                series[drafter.name] = session.drafter_series(ready.limits, ready.pace, known, budget_s)
        return series

    def _keep(
        self,
        part: EnginePart,
        series: Mapping[str, session.ShapeSeries],
        ready: Ready,
        on_failure: Callable[[str, str, str], None],
    ) -> None:
        """Add to the profile what was measured well enough, and call `on_failure` for each of the rest."""
        keeps: dict[str, Callable[[], None]] = {}
        if part.target:
            keeps[""] = lambda: self._keep_target(series[""], ready)
        for drafter in part.drafters:
            keeps[drafter.name] = partial(self._keep_drafter, drafter, series.get(drafter.name) or series[""], ready)
        for name, keep in keeps.items():
            try:
                keep()
            except ProfilingError as error:
                on_failure(error.reason, error.message, name)

    def _keep_target(self, series: session.ShapeSeries, ready: Ready) -> None:
        boot = self._task.boot
        fitted = fit_target(series)
        self._profile.fitted_target = fitted
        check_quiet(fitted.values())
        commit = weights_commit(self._paths.models.location(boot.target, TARGET_MOUNT), boot.target.revision)
        self._profile.target = target_profile(
            fitted,
            series,
            ready.limits,
            keys=self._task.keys,
            model=boot.target.name,
            device=ready.device,
            engine_version=ready.engine_version,
            commit=commit,
            measured_at=_timestamp(),
        )

    def _keep_drafter(self, drafter: DrafterSpec, series: session.ShapeSeries, ready: Ready) -> None:
        commit = ""
        if drafter.neural is not None:
            model = drafter.neural.model
            commit = weights_commit(self._paths.models.location(model, draft_mount(drafter.name)), model.revision)
        known = ready.drafters[drafter.name]
        fitted = fit_drafter(series, known)
        self._profile.fitted_drafters[drafter.name] = fitted
        check_quiet([fitted])
        if drafter.sparse_self is not None:
            self._profile.self_drafting[drafter.name] = drafter.sparse_self, self._task.boot.max_draft_tokens
        key = self._task.keys.drafters[drafter.name]
        profile = drafter_profile(fitted, known, key=key, commit=commit, measured_at=_timestamp())
        self._profile.drafters.append(profile)

    def _fail(self, reason: str, message: str, drafter: str = "") -> None:
        if any(known.drafter == drafter for known in self._profile.failures):
            return  # the first failure is the cause, and later ones its consequences
        self._profile.failures.append(failure(reason, message, drafter))
        self._say(f"{drafter or 'target'}: {reason}: {message}")


def _part_name(part: EnginePart) -> str:
    names = ["the target"] if part.target else []
    return ", ".join(names + [f"drafter {drafter.name!r}" for drafter in part.drafters])


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
