"""decide(observed, settings) -> Plan: everything that the operator decides, without any I/O.

The rooms, lowest first: `reading`, `quantities`, `ownership`, `drift` and `pods` read what the cluster says;
`pod_spec` writes pods; `revisions`, `runtime_image`, `profile_store` and `intent` say what the spec asks for;
`workloads` and `profiling` decide about children and Jobs; `figures` turns counters into numbers; `conditions` tells
the user.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import ConditionStatus, ConditionType, SpeculativeServiceStatus

from outrider_operator.decide.conditions.availability import available, endpoint_ready
from outrider_operator.decide.conditions.judgement import goodput_healthy, slo_attained, speculation_active
from outrider_operator.decide.conditions.network import explained, why_unheard
from outrider_operator.decide.conditions.profiles import profile_statuses, profiles_ready
from outrider_operator.decide.conditions.rollout import next_capacity_check_s, progressing, updated
from outrider_operator.decide.conditions.specification import spec_verdict
from outrider_operator.decide.conditions.status import events, with_verdicts
from outrider_operator.decide.conditions.verdict import Verdict, Verdicts, false
from outrider_operator.decide.figures import status as figure_status
from outrider_operator.decide.intent import Intent, intent
from outrider_operator.decide.ownership import selector
from outrider_operator.decide.pods import next_creation_check_s, ready
from outrider_operator.decide.profiling.jobs import plan_jobs
from outrider_operator.decide.profiling.measurements import Measurement, measurements, stale_in_s
from outrider_operator.decide.profiling.profile_maps import plan_profile_maps
from outrider_operator.decide.reading import integer, is_being_deleted
from outrider_operator.decide.workloads.children import plan_workloads
from outrider_operator.model import Observed, Plan, Settings

__all__ = ["decide"]


def decide(observed: Observed, settings: Settings) -> Plan:
    """The plan that brings the cluster one step nearer to what the service asks for; never raises on odd input."""
    if is_being_deleted(observed.service):  # garbage collection takes the children
        return Plan(status=observed.status)
    verdict, spec = spec_verdict(observed, settings), observed.parsed
    if isinstance(spec, str) or (verdict.status is not ConditionStatus.TRUE and not observed.rejections):
        return _leave_children(observed, verdict, None if isinstance(spec, str) else spec)
    return _serve(observed, settings, spec, verdict)


def _serve(observed: Observed, settings: Settings, spec: SpeculativeServiceSpec, verdict: Verdict) -> Plan:
    """The plan for a spec that may be applied (a child that was refused is tried again: quotas change)."""
    asked = intent(observed, settings, spec)
    found = measurements(observed, asked)
    workloads = plan_workloads(observed, settings, asked)
    maps, jobs = plan_profile_maps(observed, asked, found), plan_jobs(observed, settings, asked, found)
    status = _status(observed, settings, asked, found, verdict)
    return Plan(
        create=(*workloads.create, *maps.create, *jobs.create),
        apply=(*maps.apply, *workloads.apply),
        adopt=jobs.adopt,
        annotate=workloads.annotate,
        delete=(*workloads.delete, *maps.delete, *jobs.delete),
        status=status,
        events=events(observed.status, status),
        requeue_after_s=_next_look_s(observed, settings, asked, found, workloads.requeue_after_s, jobs.requeue_after_s),
    )


def _status(
    observed: Observed, settings: Settings, asked: Intent, found: list[Measurement], verdict: Verdict
) -> SpeculativeServiceStatus:
    spec = asked.spec
    unheard = why_unheard(observed.unheard, ready(observed), observed.network_policies)
    observed = replace(observed, figures=explained(observed.figures, unheard))
    status = _counted(observed).model_copy(
        update={
            "accelerator": ",".join(spec.accelerator.products),
            "runtime_image": asked.default_image,
            "newer_runtime_image": asked.newer_image,
            **_figures(observed, spec),
            "drafts": figure_status.drafts(observed, asked, found),
            "profiles": profile_statuses(observed, asked, found),
        }
    )
    verdicts: Verdicts = {
        ConditionType.SPEC_VALID: verdict,
        ConditionType.PROFILES_READY: profiles_ready(observed, asked, found),
        ConditionType.AVAILABLE: available(observed, spec.replicas),
        ConditionType.UPDATED: updated(observed, asked, unheard),
        ConditionType.PROGRESSING: progressing(observed, settings, asked),
        ConditionType.READY: endpoint_ready(observed, spec.replicas),
        ConditionType.SPECULATION_ACTIVE: speculation_active(observed, asked),
        ConditionType.GOODPUT_HEALTHY: goodput_healthy(observed, asked),
        ConditionType.SLO_ATTAINED: slo_attained(observed, asked, found),
    }
    return with_verdicts(status, verdicts, observed.generation, observed.now)


def _figures(observed: Observed, spec: SpeculativeServiceSpec) -> dict[str, Any]:
    if figure_status.between_windows(observed):
        return {}
    figures = observed.figures.current
    return {
        "summary": figure_status.summary(spec, figures),
        "goodput": figure_status.goodput(figures),
        "slo_classes": figure_status.slo_classes(spec, figures),
    }


def _leave_children(observed: Observed, verdict: Verdict, spec: SpeculativeServiceSpec | None) -> Plan:
    """Nothing is applied; what is served is still told."""
    replicas = spec.replicas if spec is not None else integer(observed.deployment or {}, "spec", "replicas")
    verdicts: Verdicts = {
        ConditionType.SPEC_VALID: verdict,
        ConditionType.AVAILABLE: available(observed, replicas),
        ConditionType.UPDATED: false(verdict.reason, "The spec is not applied; see SpecValid."),
        ConditionType.READY: endpoint_ready(observed, replicas),
    }
    status = with_verdicts(_counted(observed), verdicts, observed.generation, observed.now)
    return Plan(status=status, events=events(observed.status, status))


def _counted(observed: Observed) -> SpeculativeServiceStatus:
    """The status so far, with what can be counted without a spec."""
    deployment = observed.deployment or {}
    return observed.status.model_copy(
        update={
            "observed_generation": observed.generation,
            "replicas": integer(deployment, "status", "replicas"),
            "ready_replicas": len(ready(observed)),
            "updated_replicas": integer(deployment, "status", "updatedReplicas"),
            "selector": ",".join(f"{name}={value}" for name, value in selector(observed.name).items()),
        }
    )


def _next_look_s(
    observed: Observed, settings: Settings, asked: Intent, found: list[Measurement], *waits: float | None
) -> float | None:
    """The nearest moment at which time alone changes a decision."""
    running = asked.running.name if asked.running is not None else ""
    aging = [stale_in_s(asked, each.keys, each.store, observed.now) for each in found]
    moments = [*waits, *aging, next_capacity_check_s(observed, settings, running), next_creation_check_s(observed)]
    return min((moment for moment in moments if moment is not None and moment > 0), default=None)
