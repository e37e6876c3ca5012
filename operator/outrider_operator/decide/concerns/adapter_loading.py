"""Condition AdaptersLoaded, and `status.adapters`: may requests name each LoRA adapter? Nothing else depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider_crds.runtime_state import AdapterState, RuntimeState
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import AdapterStatus, ConditionReason

from outrider_operator.cluster_model import WindowCounts
from outrider_operator.decide.figures.behaviour import MeasuredBehaviour
from outrider_operator.decide.figures.numbers import rounded, three_digits
from outrider_operator.decide.figures.samples import LEAST_TOKENS
from outrider_operator.decide.verdict import Verdict, false, true, unknown
from outrider_operator.validation.reading import cut

_MOST_NAMED = 4
_MEASURED = {"acceptance_rate", "attainment_percent", "requests"}


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
        **(_measured(behaviour.windows.current, reports.name) if kept is None else kept.model_dump(include=_MEASURED)),
    )


def _measured(figures: WindowCounts | None, name: str) -> dict[str, Any]:
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
    """A few names, and how many there are besides."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return cut(f"{', '.join(names[:_MOST_NAMED])}{more}", 1024)
