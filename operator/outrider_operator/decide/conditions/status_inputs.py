"""Compute the status of a service whose spec can be read: the verdicts of all conditions, and the other fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import ConditionType

from outrider_operator.cluster_model import ApiRefusal
from outrider_operator.decide.canary.draft_canary import CanaryRollout
from outrider_operator.decide.conditions.adapter_loading import adapter_statuses, adapters_loaded
from outrider_operator.decide.conditions.canary import canary_status
from outrider_operator.decide.conditions.downloads import prefetch_status
from outrider_operator.decide.conditions.judgement import goodput_healthy, slo_attained, speculation_active
from outrider_operator.decide.conditions.kstatus import with_kstatus
from outrider_operator.decide.conditions.pod_availability import available, endpoint_ready
from outrider_operator.decide.conditions.profile_conditions import ProfileInputs, profile_statuses, profiles_ready
from outrider_operator.decide.conditions.rollout import RolloutView, progressing, updated
from outrider_operator.decide.conditions.specification import accepted
from outrider_operator.decide.conditions.verdict import Verdict, Verdicts
from outrider_operator.decide.figures import status_figures
from outrider_operator.decide.figures.behaviour import MeasuredBehaviour
from outrider_operator.decide.figures.demand import demand
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.validation.reading import name_of


@dataclass(frozen=True)
class StatusInputs:
    """Everything that the status of a service is computed from."""

    rollout: RolloutView
    behaviour: MeasuredBehaviour
    profile_inputs: ProfileInputs
    profiles: list[ProductProfile]
    unreachable: str
    """Sentence about a pod that does not answer; empty if all do."""
    is_reachable: bool
    """Does a Kubernetes Service select the pods?"""
    rewritten: tuple[ApiRefusal, ...]
    """Objects that admission changed when they were stored."""
    replica_rivals: tuple[str, ...]
    """Field managers that set spec.replicas in turn."""
    canary: CanaryRollout
    """Draft canary of the service."""
    pool: Verdict
    """Verdict about the InferencePool."""
    generation: int
    """metadata.generation of the spec."""

    @property
    def spec(self) -> SpeculativeServiceSpec:
        return self.rollout.desired.spec


def verdicts(inputs: StatusInputs, unschedulable_s: float) -> Verdicts:
    """Verdicts of all conditions. A pod without a node for `unschedulable_s` counts as NoCapacity."""
    spec, pods, behaviour = inputs.spec, inputs.rollout.pods, inputs.behaviour
    own = {
        ConditionType.SPEC_VALID: inputs.rollout.refused or accepted(inputs.rewritten, inputs.replica_rivals),
        ConditionType.PROFILES_READY: profiles_ready(inputs.profile_inputs, inputs.profiles),
        ConditionType.AVAILABLE: available(pods, inputs.rollout.desired.replicas),
        ConditionType.UPDATED: updated(inputs.rollout, behaviour.states, inputs.unreachable),
        ConditionType.PROGRESSING: progressing(inputs.rollout, unschedulable_s),
        ConditionType.READY: endpoint_ready(
            pods, spec.replicas, is_reachable=inputs.is_reachable, canaries=inputs.canary.ready_pods
        ),
        ConditionType.SPECULATION_ACTIVE: speculation_active(behaviour, spec),
        ConditionType.GOODPUT_HEALTHY: goodput_healthy(behaviour, spec),
        ConditionType.INFERENCE_POOL_READY: inputs.pool,
        ConditionType.ADAPTERS_LOADED: adapters_loaded(spec, behaviour.states, map(name_of, pods.ready)),
        ConditionType.SLO_ATTAINED: slo_attained(behaviour, spec, inputs.profiles),
    }
    return with_kstatus(own)


def fields(inputs: StatusInputs) -> dict[str, Any]:
    """Fields of the status other than conditions and counts."""
    spec, desired = inputs.spec, inputs.rollout.desired
    return {
        "rollout": canary_status(inputs.behaviour.last_status.rollout, inputs.canary, inputs.generation),
        "prefetch": prefetch_status(inputs.rollout.prefetch),
        "accelerator": ",".join(spec.accelerator.products),
        "runtime_image": desired.running_image,
        "newer_runtime_image": desired.newer_image,
        "drafts": status_figures.drafts(inputs.behaviour, spec, inputs.profiles),
        "adapters": adapter_statuses(spec, inputs.behaviour),
        "profiles": profile_statuses(inputs.profile_inputs, inputs.profiles),
        **_figures(inputs.behaviour, spec, inputs.profiles),
    }


def _figures(
    behaviour: MeasuredBehaviour, spec: SpeculativeServiceSpec, profiles: list[ProductProfile]
) -> dict[str, Any]:
    if behaviour.between_windows:
        return {}
    figures = behaviour.windows.current
    return {
        "summary": status_figures.summary(spec, figures),
        "goodput": status_figures.goodput(figures),
        "slo_classes": status_figures.slo_classes(spec, figures),
        "demand": demand(spec, figures, profiles),
    }
