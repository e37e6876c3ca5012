"""The whole profile: which engines to start, what each measures, and what the result says about what failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from outrider_crds.long_contexts import SelfDraft, self_draft
from outrider_crds.profile import DrafterProfile, ProfileKeys, ProfilingFailure, ProfilingResult, TargetProfile
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, HotConfig, draft_mount
from outrider_crds.spec import Backend, Drafter, DraftMethod, DraftPrefill, PromptLookup, SparseSelf, SpeculationMode

from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.drafters import traits
from outrider_runtime.drafters.pool import model_config
from outrider_runtime.identity import weights_commit
from outrider_runtime.paths import Paths
from outrider_runtime.profiler import failures, session
from outrider_runtime.profiler.documents import check_quiet, drafter_profile, fit_drafter, fit_target, target_profile
from outrider_runtime.profiler.engines import ENGINES
from outrider_runtime.profiler.engines.engine import Launch
from outrider_runtime.profiler.failures import ProfilingError, failure
from outrider_runtime.profiler.fitting import FittedCost
from outrider_runtime.profiler.protocol import Ask, Ready
from outrider_runtime.profiler.remote import Engine, engine
from outrider_runtime.profiler.samples import Visit

VERIFIES = Drafter(name="outrider", method=DraftMethod.PROMPT_LOOKUP, prompt_lookup=PromptLookup())
"""What a target without a pool is measured with: a drafter may be added later, and what it costs to verify is the
target's."""

StartEngine = Callable[[Backend, Launch], AbstractContextManager[Engine]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure."""

    boot: BootConfig
    keys: ProfileKeys
    target: bool
    drafters: tuple[Drafter, ...]


@dataclass(slots=True)
class Profile:
    """What was measured and what was not."""

    target: TargetProfile | None = None
    drafters: list[DrafterProfile] = field(default_factory=list)
    failures: list[ProfilingFailure] = field(default_factory=list)
    fitted_target: Mapping[ExecutionMode, FittedCost] = field(default_factory=dict)
    fitted_drafters: dict[str, FittedCost] = field(default_factory=dict)
    """By drafter name. These two are for the report: they also hold what was too noisy for a profile."""
    self_drafting: dict[str, tuple[SparseSelf, int]] = field(default_factory=dict)
    """Drafter that is the target over a window -> its block, and the largest draft length."""
    measured_s: float = 0.0

    def self_drafts(self) -> dict[str, SelfDraft]:
        """By drafter name, of those that were measured along with the target."""
        if self.target is None:
            return {}
        known = self.self_drafting
        return {one.name: self_draft(self.target, one, *known[one.name]) for one in self.drafters if one.name in known}

    def result(self) -> ProfilingResult:
        return ProfilingResult(target=self.target, drafters=self.drafters, failures=self.failures)


@dataclass(frozen=True, slots=True)
class Part:
    """What one engine measures."""

    target: bool
    drafters: tuple[Drafter, ...]

    @property
    def names(self) -> list[str]:
        """As failures name them: the target is the empty name."""
        return [""] * self.target + [drafter.name for drafter in self.drafters]

    def of(self, names: Container[str]) -> Part:
        """What of it is in `names`."""
        return Part(self.target and "" in names, tuple(one for one in self.drafters if one.name in names))


def has_weights(drafter: Drafter) -> bool:
    """Whether the engine loads something for it: a model of its own, or layers of the target's checkpoint (MTP)."""
    return drafter.neural is not None or drafter.mtp is not None


def apart(part: Part) -> list[Part]:
    """Every drafter with weights in an engine of its own; the rest goes with the first."""
    lookups = tuple(drafter for drafter in part.drafters if not has_weights(drafter))
    neural = [drafter for drafter in part.drafters if has_weights(drafter)]
    return [Part(part.target, (*lookups, *neural[:1])), *(Part(False, (other,)) for other in neural[1:])]


class Profiler:
    """Measures everything in one engine, as it serves; there each drafter runs alone, by orders. Where that engine
    fails it goes on with what is left: a failure of one costs the others nothing."""

    def __init__(
        self,
        wanted: Wanted,
        paths: Paths,
        budget_s: float,
        say: Say,
        start: StartEngine = engine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = wanted
        self._paths = paths
        self._backend = wanted.boot.engine.backend
        self._budget_left_s = budget_s
        self._say = say
        self._start = start
        self._clock = clock
        self._turns_left = 1
        self._asked = ""
        """The drafter that proposes in the shape under way."""
        self._profile = Profile()

    def run(self) -> Profile:
        try:
            target = self._wanted.boot.target
            model_config(target, self._paths.models.location(target, TARGET_MOUNT))
        except (OSError, ValueError) as error:
            self._fail(failures.MODEL_NOT_FOUND, f"the target cannot be read: {error}")
            return self._profile
        self._measure_parts([Part(self._wanted.target, self._wanted.drafters)])
        return self._profile

    def _measure_parts(self, turns: Sequence[Part]) -> None:
        for index, part in enumerate(turns):
            self._turns_left = len(turns) - index
            self._measure_part(part)

    def _measure_part(self, part: Part) -> None:
        launch = self._plan(part)
        self._name_failures(part, launch.pool.dropped)
        part = part.of({"", *(drafter.name for drafter in launch.pool.hosted)})
        if part.names:
            self._run_engine(part, launch)

    def _name_failures(self, part: Part, reasons: Mapping[str, str]) -> None:
        for name, sentence in reasons.items():
            if name in part.names:
                self._fail(failures.of_obstacle(sentence), sentence, name)

    def _run_engine(self, part: Part, launch: Launch) -> None:
        """Measure `part`; where a drafter brings the engine down, measure the rest without it."""
        try:
            self._asked = ""
            self._measure(part, launch)
        except ProfilingError as error:
            self._go_on(self._missing(part), self._guilty(part, launch, error), error)

    def _go_on(self, rest: Part, guilty: tuple[str, str] | None, error: ProfilingError) -> None:
        neural = [drafter for drafter in rest.drafters if has_weights(drafter)]
        if guilty is None and len(neural) > 1:  # any of them
            self._measure_parts(apart(rest))
        elif guilty is None:
            for name in rest.names:
                self._fail(error.reason, error.message, name)
        else:
            name, cause = guilty
            reason = failures.DRAFTER_FAILED if error.reason == failures.ENGINE_FAILED else error.reason
            self._fail(reason, cause, name)
            rest = rest.of({*rest.names} - {name})
            if rest.names:
                self._measure_part(rest)

    def _guilty(self, part: Part, launch: Launch, error: ProfilingError) -> tuple[str, str] | None:
        """Drafter and sentence: the one that the engine blames, the one that ran, or the only one with a model."""
        named = launch.blamed(error)
        neural = [drafter.name for drafter in part.drafters if has_weights(drafter)]
        known = [name for name in neural if name in named or name == self._asked]
        suspects = known or neural
        return (suspects[0], named.get(suspects[0], error.message)) if len(suspects) == 1 else None

    def _missing(self, part: Part) -> Part:
        """What of `part` is not measured yet."""
        measured = {profile.name for profile in self._profile.drafters}
        measured |= {""} if self._profile.target is not None else set()
        return part.of({*part.names} - measured)

    def _plan(self, part: Part) -> Launch:
        """Beside what is measured the engine hosts the service's drafters without weights, as when it serves."""
        measured = {drafter.name for drafter in part.drafters}
        others = [drafter for drafter in self._wanted.boot.draft_pool if drafter.name not in measured]
        lookups = [drafter for drafter in others if not has_weights(drafter)]
        pool = [*part.drafters, *lookups] or [VERIFIES]
        boot = self._wanted.boot.model_copy(update={"draft_pool": pool})
        hot = HotConfig(
            mode=SpeculationMode.CLOSED_LOOP, draft_prefill=DraftPrefill.AUTO, max_draft_tokens=boot.max_draft_tokens
        )
        return ENGINES[self._backend].plan(boot, hot, self._paths)

    def _measure(self, part: Part, launch: Launch) -> None:
        """Start the engine, measure, and keep what came of it, also when the engine fails on the way."""
        if self._budget_left_s <= 0:
            text = f"the time budget was spent before {_named(part)} had a turn; raise profiling.timeBudget"
            raise ProfilingError(failures.TIME_BUDGET_TOO_SMALL, text)
        self._say(f"starting the engine for {_named(part)} (this does not count towards the time budget)")
        began = self._clock()
        with self._start(self._backend, launch) as running:
            ready = running.wait_ready(lambda waited_s: self._say(f"the engine is starting, {waited_s:.0f} s so far"))
            self._say(f"the engine is up after {self._clock() - began:.0f} s on {ready.device}")
            left_out = launch.left_out()
            self._name_failures(part, left_out)
            part = part.of({*part.names} - left_out.keys())
            budget = session.Budget(self._budget_left_s / self._turns_left, self._clock(), self._clock)
            series = self._series(part, launch, ready, budget.total_s)
            try:
                session.run(list(series.values()), partial(self._visit, running), budget, self._say)
            except ProfilingError:
                self._keep(part, series, ready, on_failure=lambda *_: None)  # the engine's end is the failure to tell
                raise
            finally:
                self._profile.measured_s += budget.elapsed_s
                self._budget_left_s -= budget.elapsed_s
            self._keep(part, series, ready, on_failure=self._fail)

    def _visit(self, running: Engine, ask: Ask) -> Visit:
        self._asked = ask.drafter or ""
        return running.visit(ask)

    def _series(self, part: Part, launch: Launch, ready: Ready, budget_s: float) -> dict[str, session.Series]:
        """By drafter name, the target's under the empty name. One lookup is measured along with the target."""
        series: dict[str, session.Series] = {}
        lookups = [entry for entry in launch.pool.hosted if not (traits(entry).passes or traits(entry).reads)]
        along = next(iter(lookups), launch.pool.primary)
        if part.target:
            name = along.name if along is not None else None
            series[""] = session.target_series(ready.limits, ready.pace, name, budget_s)
        for drafter in part.drafters:
            known = ready.drafters[drafter.name]
            if known.passes or known.reads or drafter != along or not part.target:
                series[drafter.name] = session.drafter_series(ready.limits, ready.pace, known, budget_s)
        return series

    def _keep(
        self,
        part: Part,
        series: Mapping[str, session.Series],
        ready: Ready,
        on_failure: Callable[[str, str, str], None],
    ) -> None:
        """Put into the profile whatever was measured well enough; each of the others is a failure of its own."""
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

    def _keep_target(self, series: session.Series, ready: Ready) -> None:
        boot = self._wanted.boot
        fitted = fit_target(series)
        self._profile.fitted_target = fitted
        check_quiet(fitted.values())
        commit = weights_commit(self._paths.models.location(boot.target, TARGET_MOUNT), boot.target.revision)
        self._profile.target = target_profile(
            fitted,
            series,
            ready.limits,
            keys=self._wanted.keys,
            model=boot.target.name,
            device=ready.device,
            engine_version=ready.engine_version,
            commit=commit,
            now=_now(),
        )

    def _keep_drafter(self, drafter: Drafter, series: session.Series, ready: Ready) -> None:
        commit = ""
        if drafter.neural is not None:
            model = drafter.neural.model
            commit = weights_commit(self._paths.models.location(model, draft_mount(drafter.name)), model.revision)
        known = ready.drafters[drafter.name]
        fitted = fit_drafter(series, known)
        self._profile.fitted_drafters[drafter.name] = fitted
        check_quiet([fitted])
        if drafter.sparse_self is not None:
            self._profile.self_drafting[drafter.name] = drafter.sparse_self, self._wanted.boot.max_draft_tokens
        key = self._wanted.keys.drafters[drafter.name]
        self._profile.drafters.append(drafter_profile(fitted, known, key=key, commit=commit, now=_now()))

    def _fail(self, reason: str, message: str, drafter: str = "") -> None:
        if any(known.drafter == drafter for known in self._profile.failures):
            return  # the first failure is the cause, later ones are its echo
        self._profile.failures.append(failure(reason, message, drafter))
        self._say(f"{drafter or 'target'}: {reason}: {message}")


def _named(part: Part) -> str:
    names = ["the target"] if part.target else []
    return ", ".join(names + [f"drafter {drafter.name!r}" for drafter in part.drafters])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
