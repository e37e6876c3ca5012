"""The concern of pods that another workload makes: the file that they mount, and whether the spec is in force in them.

Outrider restarts none of them: a condition names the pods that someone must restart.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from outrider_crds.base import digest
from outrider_crds.conditions import ConditionReason, ConditionStatus, ConditionType
from outrider_crds.existing_pods import CONFIG_FILE_KEY, ExistingPods, config_file
from outrider_crds.existing_pods_rules import PODS_ARE_THEIRS
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.texts import name_some

from outrider_operator.cluster_model import CONFIG_MAP, Object, ServiceIdentity, config_file_map_name
from outrider_operator.decide.concerns.specification_outcome import refused, spec_valid
from outrider_operator.decide.concerns.workload_outcome import available, lacking, ready_if_any
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.drift import stamp
from outrider_operator.decide.outcome import ConcernOutcome, Verdict, false, true, unknown
from outrider_operator.decide.ownership import child_document
from outrider_operator.decide.specification import name_conflict
from outrider_operator.validation.reading import cut, name_of
from outrider_operator.validation.reports import REFUSED

_MOST_NAMED = 4


def existing_workload(world: ServiceWorld, spec: SpeculativeServiceSpec, existing: ExistingPods) -> ConcernOutcome:
    """The pods' file, and all conditions but those of figures."""
    pods, problem, file_digest = world.pods, _problem(world, spec), digest(config_file(spec))
    rejected, missing = refused(world.observed, problem), None if pods.living else _no_pod(existing)
    updated = rejected or missing or _in_force(world, file_digest)
    learning = "Pods of another workload are not measured: they learn their step times while they serve."
    return ConcernOutcome(
        objects=() if problem is not None else (stamp(config_file_map(world.children.owner, spec)),),
        conditions={
            ConditionType.SPEC_VALID: spec_valid(world.observed, problem),
            ConditionType.PROFILES_READY: false(ConditionReason.LEARNING, learning),
            ConditionType.AVAILABLE: missing or available(pods, len(pods.living)),
            ConditionType.UPDATED: updated,
            ConditionType.PROGRESSING: _progressing(updated, is_rejected=rejected is not None),
            ConditionType.READY: ready_if_any(pods),
            ConditionType.INFERENCE_POOL_READY: unknown(ConditionReason.NOT_REQUESTED, "The platform routes to pods."),
        },
        status={
            "observed_generation": world.observed.generation,
            "replicas": len(pods.living),
            "ready_replicas": len(pods.ready),
            "updated_replicas": sum(state.file_digest == file_digest for state in world.states.values()),
            "selector": str(existing.pod_selector),
            "accelerator": ",".join(spec.accelerator.products),
        },
    )


def config_file_map(owner: ServiceIdentity, spec: SpeculativeServiceSpec) -> Object:
    """The ConfigMap with the file that OUTRIDER_CONFIG names in the pods."""
    data = {CONFIG_FILE_KEY: json.dumps(config_file(spec), indent=1)}
    return child_document(owner, CONFIG_MAP, config_file_map_name(owner.name), data=data)


def _problem(world: ServiceWorld, spec: SpeculativeServiceSpec) -> Verdict | None:
    """Why the file must not be written."""
    children, key = world.children, (CONFIG_MAP, config_file_map_name(world.children.owner.name))
    if field := next(iter(spec.pod_template.others), ""):  # no CEL sees it
        return false(ConditionReason.INVALID_SPEC, f"podTemplate.{cut(field)}: {PODS_ARE_THEIRS}.")
    if children.workloads or children.canary:
        sentence = "This service has pods that Outrider made, and workload.existing would leave them alone: delete the "
        return false(ConditionReason.INVALID_SPEC, f"{sentence}service and apply it again, or remove workload.")
    return name_conflict(key, children.documents[key]) if children.foreign([key]) else None


def _in_force(world: ServiceWorld, file_digest: str) -> Verdict:
    """Is the spec in force in every ready pod, and is no part of it left for a restart?"""
    pods = world.pods
    if not pods.ready:
        why = lacking(pods, ConditionReason.NO_READY_ENDPOINT, "No selected pod is ready").message
        return false(ConditionReason.CONFIG_PENDING, why)
    for reason, sentence, words in _OBSTACLES:
        if named := [
            f"{pod} ({said.rstrip('.')})"
            for pod in map(name_of, pods.ready)
            if (said := words(world, file_digest, pod))
        ]:
            return false(reason, cut(sentence.format(name_some(named, _MOST_NAMED)), 2048))
    return true(ConditionReason.UP_TO_DATE, f"The spec is in force in all {len(pods.ready)} ready pods.")


def _why_inactive(world: ServiceWorld, _: str, pod: str) -> str:
    state = world.states.get(pod)
    if state is None:
        said = world.observed.unreachable.get(pod, "")
        return said if said.startswith(REFUSED) else ""
    if not state.plugin_active:
        return "its controller does not report"
    return "" if state.file_digest else "no OUTRIDER_CONFIG, or a plugin of an older release"


def _why_silent(world: ServiceWorld, _: str, pod: str) -> str:
    return "" if pod in world.states else world.observed.unreachable.get(pod, "no report")


def _why_late(world: ServiceWorld, file_digest: str, pod: str) -> str:
    state = world.states[pod]
    mounted = f"not that of ConfigMap {config_file_map_name(world.children.owner.name)}"
    return state.config_error or ("" if state.file_digest == file_digest else mounted)


def _why_incomplete(world: ServiceWorld, _: str, pod: str) -> str:
    reports = world.states[pod].drafters
    return next((f"{report.name}: {report.reason or 'not loaded'}" for report in reports if not report.loaded), "")


_OBSTACLES: tuple[tuple[ConditionReason, str, Callable[[ServiceWorld, str, str], str]], ...] = (
    (
        ConditionReason.POD_SHARED,
        "Other SpeculativeServices have these pods, too: {}. Give each service a podSelector of its own.",
        lambda world, _, pod: world.observed.pod_rivals.get(pod, ""),
    ),
    (
        ConditionReason.NOT_ACTIVE,
        "Outrider is not active in {}. Correct the cause and restart them.",
        _why_inactive,
    ),
    (ConditionReason.CONFIG_PENDING, "Pods have yet to report: {}.", _why_silent),
    (
        ConditionReason.CONFIG_PENDING,
        "The service's file is not in force in {}. A kubelet brings a change within two minutes, if OUTRIDER_CONFIG "
        f"names {CONFIG_FILE_KEY} of the ConfigMap and the mount has no subPath.",
        _why_late,
    ),
    (
        ConditionReason.RESTART_NEEDED,
        "Outrider restarts no pod of another workload; restart {}.",
        lambda world, _, pod: world.states[pod].restart_reason,
    ),
    (ConditionReason.DRAFTER_NOT_LOADED, "Pods serve without a drafter: {}.", _why_incomplete),
)
"""What keeps the spec from being in force in a pod, worst first: reason, sentence about such pods, words for a pod."""


def _progressing(updated: Verdict, *, is_rejected: bool) -> Verdict:
    if is_rejected:
        return false(ConditionReason.STALLED, updated.message)
    if updated.reason is ConditionReason.CONFIG_PENDING:
        return true(ConditionReason.ROLLING_OUT, updated.message)
    return updated if updated.status is ConditionStatus.FALSE else false(ConditionReason.COMPLETE, updated.message)


def _no_pod(existing: ExistingPods) -> Verdict:
    sentence = (
        f"No pod of this namespace has the labels {existing.pod_selector}: correct workload.existing, or start it."
    )
    return false(ConditionReason.NO_POD_SELECTED, sentence)
