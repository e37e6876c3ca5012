"""The concern of figures: what is measured of speculation, SLO classes, adapters and demand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider_crds.conditions import ConditionReason, ConditionType
from outrider_crds.runtime_state import AdapterState, RuntimeState
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import AdapterStatus
from outrider_crds.texts import name_some

from outrider_operator.decide.concerns.judgement import goodput_healthy, slo_attained, speculation_active
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.figures import status_figures
from outrider_operator.decide.figures.demand import demand
from outrider_operator.decide.figures.samples import LEAST_TOKENS, MeasuredBehaviour, rounded, three_digits
from outrider_operator.decide.figures.status_figures import summary
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome, Verdict, false, true, unknown
from outrider_operator.decide.pods.unreachable_pods import explained
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.figure_windows import WindowCounts
from outrider_operator.validation.reading import cut, name_of

_MOST_NAMED = 4
_MEASURED = {"acceptance_rate", "attainment_percent", "requests"}


def figures(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Conditions SpeculationActive, GoodputHealthy, SLOAttained and AdaptersLoaded, and the figures of the status."""
    return figures_of(world, intent.spec, intent.profiles, world.unreachable)


def figures_of(
    world: ServiceWorld, spec: SpeculativeServiceSpec, profiles: list[ProductProfile], unreachable: str = ""
) -> ConcernOutcome:
    """unreachable: a sentence about a pod that does not answer the operator."""
    observed = world.observed
    windows = explained(observed.figures, unreachable)
    behaviour = MeasuredBehaviour(windows, observed.status, world.states, is_served=bool(world.pods.ready))
    return ConcernOutcome(
        conditions={
            ConditionType.SPECULATION_ACTIVE: speculation_active(behaviour, spec),
            ConditionType.GOODPUT_HEALTHY: goodput_healthy(behaviour, spec),
            ConditionType.ADAPTERS_LOADED: adapters_loaded(spec, behaviour.states, map(name_of, world.pods.ready)),
            ConditionType.SLO_ATTAINED: slo_attained(behaviour, spec, profiles),
        },
        status={
            "drafts": status_figures.drafts(behaviour, spec, profiles),
            "adapters": adapter_statuses(spec, behaviour),
            **_window_figures(behaviour, spec, profiles),
        },
    )


def _window_figures(
    behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec, profiles: list[ProductProfile]
) -> dict[str, Any]:
    current = behaviour.windows.current
    columns = {"summary": summary(spec, behaviour)}
    if behaviour.between_windows:
        return {} if behaviour.last_status.summary is not None else columns
    return {
        **columns,
        "goodput": status_figures.goodput(current),
        "slo_classes": status_figures.slo_classes(spec, current),
        "demand": demand(spec, current, profiles),
    }


@dataclass(frozen=True)
class _Reports:
    """What the ready pods say of one adapter."""

    name: str
    pods: int
    loaded: int
    problem: str
    """Sentence of a pod that could not load it; empty without one."""

    @property
    def is_loaded(self) -> bool:
        return self.pods > 0 and self.loaded == self.pods


def adapters_loaded(
    spec: SpeculativeServiceSpec, states: Mapping[str, RuntimeState], ready: Iterable[str]
) -> Verdict:  # fmt: skip
    """Condition AdaptersLoaded. states: name of a ready pod -> its last report. ready: names of ready pods."""
    if not spec.adapters:
        return unknown(ConditionReason.NO_ADAPTERS, "spec.adapters is empty.")
    if not states:
        return unknown(ConditionReason.PENDING, "No ready pod has reported yet.")
    reports = [_reports(adapter.name, states) for adapter in spec.adapters]
    if problems := [report for report in reports if report.problem]:
        return false(ConditionReason.NOT_LOADED, _said(problems))
    if missing := [report.name for report in reports if not report.is_loaded]:
        return unknown(ConditionReason.LOADING, f"Pods are loading {_some(missing)}.")
    if silent := [name for name in ready if name not in states]:
        return unknown(ConditionReason.LOADING, f"Pods have not reported yet: {_some(silent)}.")
    return true(ConditionReason.ALL_LOADED, f"Every ready pod serves {_some([report.name for report in reports])}.")


def adapter_statuses(spec: SpeculativeServiceSpec, behaviour: MeasuredBehaviour) -> list[AdapterStatus]:
    return [_status(_reports(adapter.name, behaviour.states), behaviour) for adapter in spec.adapters]


def _status(reports: _Reports, behaviour: MeasuredBehaviour) -> AdapterStatus:
    last = next((adapter for adapter in behaviour.last_status.adapters if adapter.name == reports.name), None)
    kept = last if behaviour.between_windows else None
    return AdapterStatus(
        name=reports.name,
        loaded=reports.is_loaded,
        pods=f"{reports.loaded}/{reports.pods}",
        reason=reports.problem,
        **(
            _measured_figures(behaviour.windows.current, reports.name)
            if kept is None
            else kept.model_dump(include=_MEASURED)
        ),
    )


def _measured_figures(figures: WindowCounts | None, name: str) -> dict[str, Any]:
    if figures is None or name not in figures.gained.adapters:
        return {}
    seen = figures.gained.adapters[name]
    finished, attained = sum(seen.finished.values()), sum(seen.attained.values())
    return {
        "acceptance_rate": three_digits(seen.accepted / seen.tried) if seen.tried >= LEAST_TOKENS else "",
        "attainment_percent": three_digits(100 * attained / finished) if finished > 0 else "",
        "requests": rounded(finished),
    }


def _reports(name: str, states: Mapping[str, RuntimeState]) -> _Reports:
    own: list[AdapterState] = [
        adapter for state in states.values() for adapter in state.adapters if adapter.name == name
    ]
    problems = sorted({adapter.reason for adapter in own if adapter.reason})
    loaded = sum(any(a.name == name and a.loaded for a in state.adapters) for state in states.values())
    return _Reports(name, len(states), loaded, problems[0] if problems else "")


def _said(problems: list[_Reports]) -> str:
    first, more = problems[0], len(problems) - 1
    others = f" {more} more {'is' if more == 1 else 'are'} not loaded; see status.adapters." if more else ""
    rest = "The target and the other adapters serve on"
    return f"Adapter {first.name} is not loaded: {first.problem.rstrip('.')}. {rest}; it is tried again.{others}"


def _some(names: list[str]) -> str:
    return cut(name_some(names, _MOST_NAMED), 1024)
