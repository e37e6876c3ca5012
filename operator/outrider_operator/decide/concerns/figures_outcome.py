"""The concern of figures: what is measured of speculation, SLO classes, adapters and demand."""

from __future__ import annotations

from typing import Any

from outrider_crds.status import ConditionType

from outrider_operator.decide.concerns.adapter_loading import adapter_statuses, adapters_loaded
from outrider_operator.decide.concerns.judgement import goodput_healthy, slo_attained, speculation_active
from outrider_operator.decide.figures import status_figures
from outrider_operator.decide.figures.behaviour import MeasuredBehaviour
from outrider_operator.decide.figures.demand import demand
from outrider_operator.decide.figures.printer_columns import summary
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.service_world import ServiceWorld
from outrider_operator.decide.unreachable_pods import explained
from outrider_operator.validation.reading import name_of


def figures(world: ServiceWorld, intent: Intent) -> ConcernOutcome:
    """Conditions SpeculationActive, GoodputHealthy, SLOAttained and AdaptersLoaded, and the figures of the status."""
    spec, observed = intent.spec, world.observed
    windows = explained(observed.figures, world.unreachable)
    behaviour = MeasuredBehaviour(windows, observed.status, world.states, is_served=bool(world.pods.ready))
    return ConcernOutcome(
        conditions={
            ConditionType.SPECULATION_ACTIVE: speculation_active(behaviour, spec),
            ConditionType.GOODPUT_HEALTHY: goodput_healthy(behaviour, spec),
            ConditionType.ADAPTERS_LOADED: adapters_loaded(spec, behaviour.states, map(name_of, world.pods.ready)),
            ConditionType.SLO_ATTAINED: slo_attained(behaviour, spec, intent.profiles),
        },
        status={
            "drafts": status_figures.drafts(behaviour, spec, intent.profiles),
            "adapters": adapter_statuses(spec, behaviour),
            **_window_figures(behaviour, intent),
        },
    )


def _window_figures(behaviour: MeasuredBehaviour, intent: Intent) -> dict[str, Any]:
    spec, current = intent.spec, behaviour.windows.current
    columns = {"summary": summary(spec, behaviour)}
    if behaviour.between_windows:
        return {} if behaviour.last_status.summary is not None else columns
    return {
        **columns,
        "goodput": status_figures.goodput(current),
        "slo_classes": status_figures.slo_classes(spec, current),
        "demand": demand(spec, current, intent.profiles),
    }
