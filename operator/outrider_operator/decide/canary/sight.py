"""Observe the pods of a canary: their sums, and trouble that prevents a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from outrider_crds.counters import ArmCounters
from outrider_crds.rollout_settings import OnMissingDrafter
from outrider_crds.rollout_status import RolloutStatus, RolloutSums
from outrider_crds.runtime_state import MEMORY_WORDS, DrafterReport, RuntimeState
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import Object, canary_names, revision_map_name
from outrider_operator.decide.canary.arms import impossible
from outrider_operator.decide.canary.machine import CanaryPods
from outrider_operator.decide.canary.pools import Pools
from outrider_operator.decide.canary.record import Cause, attempt_of
from outrider_operator.decide.desired.revisions import Revision
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.pod_spec.patch import RUNTIME
from outrider_operator.decide.pods.pod_states import Pods, revision_of
from outrider_operator.decide.pods.pod_troubles import scheduler_says, unschedulable_since, what_it_waits_for
from outrider_operator.validation.reading import (
    condition_of,
    created_s,
    cut,
    integer,
    items,
    name_of,
    text,
    unix_seconds,
)

_SETTLED_S = 60.0
"""Age of a process from which on it has read its hot config: until then it may not report a canary yet."""
_SILENT_S = 40.0
"""Seconds without a state of a ready pod that make an error: three polls. One may fail on a busy node."""
_LEAST_AGE_S = 60.0
"""Age that sums are judged by at least: clocks of pods may differ."""
_LEAST_USED = 0.02
"""Share of the candidate's (request, step) pairs below which its own drafters count as unused. Exploration alone
takes 1%."""
_LARGEST_BATCH = 4096
"""Bound of max_num_seqs where the spec leaves it to the engine: defaults are at most 1,024, and on CPUs 128 x
tensorParallelSize."""
_MIB = 1 << 20


@dataclass(frozen=True)
class CanarySight:
    """What the pods of a canary are looked at with."""

    world: ServiceWorld
    spec: SpeculativeServiceSpec
    canary: RolloutStatus
    pools: Pools
    revision: Revision | None
    """Revision of the pods that host both pools; None where none can."""
    hot_hash: str
    """Digest of the hot config that the pods should have."""

    @cached_property
    def pods(self) -> Pods:
        """The canary's pods without those of the candidate before, whose faults are not this one's."""
        name, pods = self.revision.name if self.revision is not None else "", self.world.canary_pods
        living = tuple(pod for pod in pods.living if revision_of(pod) == name)
        return replace(pods, living=living, ended=tuple(pod for pod in pods.ended if revision_of(pod) == name))

    @cached_property
    def states(self) -> list[tuple[str, RuntimeState]]:
        """(name, newest state) of the ready pods."""
        states = self.world.observed.states
        return [(name, states[name]) for pod in self.pods.ready if (name := name_of(pod)) in states]

    @property
    def heeds_missing(self) -> bool:
        """Must the running pool have all its drafters? With onMissingDrafter: Continue it is measured as it serves."""
        return self.spec.rollout.on_missing_drafter is OnMissingDrafter.HOLD

    def is_counting(self, state: RuntimeState) -> bool:
        """Does the pod count this attempt? It reports the one before until it has read its orders."""
        return state.canary is not None and state.canary.id == attempt_of(self.canary)


def canary_pods(sight: CanarySight) -> CanaryPods:
    """Observations of the canary's pods for the state machine."""
    products = sight.revision.boot.accelerator.products if sight.revision is not None else []
    reports = tuple(_reports(sight))
    troubles = (*_troubles(sight), *(() if reports else _silences(sight)))
    # A candidate that only takes drafters away runs nothing that the stable pool does not run.
    restarts = 1 + _new_restarts(sight) if sight.pools.own else None
    return CanaryPods(
        reports=reports,
        living=frozenset(name_of(pod) for pod in sight.pods.living),
        products=frozenset(products),
        trouble=next(((cause, said) for cause, said in troubles if said), None),
        not_loaded=_missing(sight, sight.pools.own),
        allowed_restarts=restarts,
        unused=_unused(sight),
        out_of_memory=next(map(_out_of_memory, filter(_was_out_of_memory, sight.pods.living)), ""),
    )


def engine_restarts(pods: Pods) -> dict[str, int]:
    """Pod name -> restarts of its engine, of the pods that had any."""
    return {
        name_of(pod): count
        for pod in pods.living
        for status in items(pod, "status", "containerStatuses")
        if text(status, "name") == RUNTIME and (count := integer(status, "restartCount")) > 0
    }


def _new_restarts(sight: CanarySight) -> int:
    """Most restarts of an engine that serves since the canary began. A pod that is not listed had fewer then."""
    before = sight.canary.restarts_before
    return max([0, *(count - before.get(name, 0) for name, count in engine_restarts(sight.world.pods).items())])


def _unused(sight: CanarySight) -> str:
    """Names of the candidate's own drafters, if its requests hardly used them; empty where no pod counts steps."""
    states, own = [state for _, state in sight.states if sight.is_counting(state)], sight.pools.own
    pairs = sum(sum(state.draft_length_steps) for state in states) * sight.canary.candidate_percent / 100.0
    used = sum(drafter.request_steps for state in states for drafter in state.drafters if drafter.name in own)
    return " and ".join(own) if used < _LEAST_USED * pairs else ""


def _was_out_of_memory(pod: Object) -> bool:
    """Did a container of it last end for want of memory? Two pools in one pod take more than either."""
    statuses = items(pod, "status", "containerStatuses")
    return any(text(status, "lastState", "terminated", "reason") == "OOMKilled" for status in statuses)


def _out_of_memory(pod: Object) -> str:
    return f"Pod {name_of(pod)}, which hosts both pools, was ended for want of memory (OOMKilled)."


def _reports(sight: CanarySight) -> Iterator[RolloutSums]:
    """Sums of this attempt, of pods in which both arms are what they should be. Without a drafter both may be one pool;
    a candidate that lacks its own proves nothing."""
    for name, state in sight.states:
        lacking = [drafter for drafter in state.drafters if not drafter.loaded]
        own = {drafter.name for drafter in lacking} & {*sight.pools.own}
        is_short = own or (sight.heeds_missing and lacking) or any(map(_lacks_memory, lacking))
        if sight.is_counting(state) and not is_short and not _impossible(sight, state):
            yield _sums(sight, name, state)


def _sums(sight: CanarySight, pod: str, state: RuntimeState) -> RolloutSums:
    """A pod's sums, of the products and SLO classes that the spec names: a pod may name any."""
    classes, products = {slo.name for slo in sight.spec.slo_classes}, sight.spec.accelerator.products

    def known(arm: ArmCounters) -> ArmCounters:
        counts = {"finished": arm.finished, "attained": arm.attained}
        kept = {key: {name: n for name, n in by_class.items() if name in classes} for key, by_class in counts.items()}
        return arm.model_copy(update=kept)

    return RolloutSums(
        product=cut(state.product if state.product in products else products[0]),
        pod=cut(pod),
        started_at=state.started_at,
        stable=known(state.canary.stable) if state.canary is not None else ArmCounters(),
        candidate=known(state.canary.candidate) if state.canary is not None else ArmCounters(),
    )


def _impossible(sight: CanarySight, state: RuntimeState) -> str:
    """What of a pod's sums no pod can have, in words; empty if all is possible."""
    sums, age_s = _sums(sight, "", state), max(_LEAST_AGE_S, state.reported_at - state.started_at)
    most_tokens = 1 + (sight.revision.boot.max_draft_tokens if sight.revision is not None else 0)
    most_requests = (sight.revision.boot.engine.max_num_seqs if sight.revision is not None else None) or _LARGEST_BATCH
    words = (impossible(arm, age_s, most_tokens, most_requests) for arm in (sums.stable, sums.candidate))
    return next(filter(None, words), "")


def _troubles(sight: CanarySight) -> Iterator[tuple[Cause, str]]:
    """Why the pods cannot measure, whatever they report. An empty sentence is none."""
    trouble = sight.pods.trouble()
    yield Cause.CANNOT_HOST_BOTH, sight.pools.problem
    yield Cause.POD_CANNOT_START, _refusal(sight)
    yield Cause.NO_CAPACITY, _no_node(sight)
    yield Cause.POD_CANNOT_START, f"{trouble.message.rstrip('.')}." if trouble is not None else ""
    yield Cause.POD_CANNOT_START, _scheduling_gates(sight) or _overdue(sight)
    yield Cause.NO_ROOM_FOR_BOTH, _no_room(sight)
    yield Cause.STABLE_NOT_LOADED, _missing(sight, sight.pools.stable) if sight.heeds_missing else ""
    counting = ((name, _impossible(sight, state)) for name, state in sight.states if sight.is_counting(state))
    forged = (f"Pod {name} reports sums that no pod can have: {words}." for name, words in counting if words)
    yield Cause.IMPOSSIBLE_SUMS, next(forged, "")


def _refusal(sight: CanarySight) -> str:
    """The API server's sentence about an object that the canary's pods need; empty where it took all."""
    service = sight.world.children.owner.name
    names = {name for _, name in canary_names(service)}
    if sight.revision is not None:
        names.add(revision_map_name(service, sight.revision.name))
    refusals = (r for r in sight.world.observed.refusals if r.name in names and not r.is_stored)
    return next((f"The API server refuses {r.kind} {r.name}: {r.message}" for r in refusals), "")


def _no_node(sight: CanarySight) -> str:
    """A sentence about a pod that has had no node for long, and that no node is being made for."""
    pods, patience_s = sight.pods, sight.world.settings.no_capacity_after_s
    for pod in pods.living:
        since = unschedulable_since(pod)
        if since is not None and pods.at - since >= patience_s and not pods.node_in_the_making(pod):
            said = scheduler_says(pod).rstrip(".") or "the scheduler finds no node"
            return f"Pod {name_of(pod)} has no node: {said}."
    return ""


def _scheduling_gates(sight: CanarySight) -> str:
    """A sentence about a pod that nothing has let to the scheduler for long."""
    late_s = sight.pods.at - sight.world.settings.no_capacity_after_s
    late_pods = (pod for pod in sight.pods.living if items(pod, "spec", "schedulingGates") and created_s(pod) <= late_s)
    return next((f"{what_it_waits_for(pod)}." for pod in late_pods), "")


def _overdue(sight: CanarySight) -> str:
    """A sentence about pods that did not get ready in time, whatever keeps them."""
    progressing = condition_of(sight.world.children.canary or {}, "Progressing")
    if sight.pods.ready or progressing.get("reason") != "ProgressDeadlineExceeded":
        return ""
    why = sight.pods.why_not_ready().rstrip(".") or "No canary pod was made"
    return f"No canary pod got ready within rollout.progressDeadline ({sight.spec.rollout.progress_deadline}). {why}."


def _silences(sight: CanarySight) -> Iterator[tuple[Cause, str]]:
    """Why ready pods report no sums."""
    for name, state in sight.states:
        if state.config_error:
            yield Cause.PODS_DO_NOT_ANSWER, f"Pod {name} refuses its config: {state.config_error.rstrip('.')}."
        is_settled = state.reported_at - state.started_at >= _SETTLED_S
        if is_settled and state.config_hash == sight.hot_hash and state.canary is None:
            yield (
                Cause.RUNTIME_TOO_OLD,
                f"Pod {name} runs a runtime that is too old for canaries: upgrade it (outrider.dev/runtime-upgrade).",
            )
    began, unreachable = unix_seconds(sight.canary.held_since) or sight.pods.at, sight.world.observed.unreachable
    late = [pod for pod in sight.pods.ready if sight.pods.at - max(began, _ready_since(pod)) >= _SILENT_S]
    for name in sorted(name for pod in late if (name := name_of(pod)) in unreachable):
        why = unreachable[name].rstrip(".")
        yield Cause.PODS_DO_NOT_ANSWER, f"Pod {name} is ready and does not report its state: {why}."


def _ready_since(pod: Object) -> float:
    return unix_seconds(text(condition_of(pod, "Ready"), "lastTransitionTime")) or 0.0


def _no_room(sight: CanarySight) -> str:
    """A pod's words about a drafter that memory has no room for, and what the hosted ones take."""
    for name, state in sight.states:
        short = next(filter(_lacks_memory, state.drafters), None)
        if short is not None:
            weights = [(drafter.name, drafter.memory.weight_bytes) for drafter in state.drafters if drafter.memory]
            taken = ", ".join(f"{drafter} with {size / _MIB:.0f} MiB of weights" for drafter, size in weights)
            hosted = f" It hosts {taken}." if taken else ""
            return f"Pod {name} leaves out drafter {short.name}: {short.reason.rstrip('.')}.{hosted}"
    return ""


def _lacks_memory(drafter: DrafterReport) -> bool:
    said = drafter.reason.lower()
    return not drafter.loaded and any(words in said for words in MEMORY_WORDS)


def _missing(sight: CanarySight, names: Iterable[str]) -> str:
    """A pod's words about a drafter of `names` that it has not loaded for another reason than memory."""
    for pod, state in sight.states:
        reported = {drafter.name: drafter for drafter in state.drafters}
        for drafter in (reported[name] for name in names if name in reported):
            if not drafter.loaded and not _lacks_memory(drafter):
                why = drafter.reason.rstrip(".") or "the pod reported no reason"
                return f"Pod {pod}: drafter {drafter.name} is not loaded: {why}."
    return ""
