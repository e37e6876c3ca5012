"""The status of a service whose spec can be read: every condition's verdict, and what else stands in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import ConditionType

from outrider_operator.decide.canary.draft_canary import CanaryRollout
from outrider_operator.decide.conditions.availability import available, endpoint_ready
from outrider_operator.decide.conditions.canary import canary_status
from outrider_operator.decide.conditions.judgement import goodput_healthy, slo_attained, speculation_active
from outrider_operator.decide.conditions.kstatus import with_kstatus
from outrider_operator.decide.conditions.profiles import Seen, profile_statuses, profiles_ready
from outrider_operator.decide.conditions.rollout import Rollout, progressing, updated
from outrider_operator.decide.conditions.specification import accepted
from outrider_operator.decide.conditions.verdict import Verdicts
from outrider_operator.decide.figures import status as figure_status
from outrider_operator.decide.figures.behaviour import Behaviour
from outrider_operator.decide.figures.demand import demand
from outrider_operator.decide.profiling.product_profiles import ProductProfile
from outrider_operator.model import Rejection


@dataclass(frozen=True)
class Served:
    """What its status is told from."""

    rollout: Rollout
    behaviour: Behaviour
    seen: Seen
    profiles: list[ProductProfile]
    unheard: str
    """A sentence about a pod that does not answer; empty where all do."""
    is_reachable: bool
    """Does a Service lead to the pods?"""
    rewritten: tuple[Rejection, ...]
    """What admission stores otherwise than it was sent."""

    canary: CanaryRollout
    """The draft canary of the service."""
    generation: int
    """metadata.generation of the spec."""

    @property
    def spec(self) -> SpeculativeServiceSpec:
        return self.rollout.asked.spec


def verdicts(served: Served, unschedulable_s: float) -> Verdicts:
    """A pod without a node for `unschedulable_s` has no room."""
    spec, pods, behaviour = served.spec, served.rollout.pods, served.behaviour
    own = {
        ConditionType.SPEC_VALID: served.rollout.refused or accepted(served.rewritten),
        ConditionType.PROFILES_READY: profiles_ready(served.seen, served.profiles),
        ConditionType.AVAILABLE: available(pods, served.rollout.asked.replicas),
        ConditionType.UPDATED: updated(served.rollout, behaviour.states, served.unheard),
        ConditionType.PROGRESSING: progressing(served.rollout, unschedulable_s),
        ConditionType.READY: endpoint_ready(pods, spec.replicas, is_reachable=served.is_reachable),
        ConditionType.SPECULATION_ACTIVE: speculation_active(behaviour, spec),
        ConditionType.GOODPUT_HEALTHY: goodput_healthy(behaviour, spec),
        ConditionType.SLO_ATTAINED: slo_attained(behaviour, spec, served.profiles),
    }
    return with_kstatus(own)


def fields(served: Served) -> dict[str, Any]:
    """The fields of the status beside conditions and counts."""
    spec, asked = served.spec, served.rollout.asked
    return {
        "rollout": canary_status(served.behaviour.standing.rollout, served.canary, served.generation),
        "accelerator": ",".join(spec.accelerator.products),
        "runtime_image": asked.running_image,
        "newer_runtime_image": asked.newer_image,
        "drafts": figure_status.drafts(served.behaviour, spec, served.profiles),
        "profiles": profile_statuses(served.seen, served.profiles),
        **_figures(served.behaviour, spec, served.profiles),
    }


def _figures(behaviour: Behaviour, spec: SpeculativeServiceSpec, profiles: list[ProductProfile]) -> dict[str, Any]:
    if behaviour.between_windows:
        return {}
    figures = behaviour.windows.current
    return {
        "summary": figure_status.summary(spec, figures),
        "goodput": figure_status.goodput(figures),
        "slo_classes": figure_status.slo_classes(spec, figures),
        "demand": demand(spec, figures, profiles),
    }
