"""Observe the pods of a canary: their sums, and trouble that prevents a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from outrider_crds.counters import ArmCounters
from outrider_crds.rollout_settings import OnMissingDrafter
from outrider_crds.runtime_state import MEMORY_WORDS, CanaryState, DrafterReport, RuntimeState
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator.cluster_model import Object
from outrider_operator.decide.canary.arms import Arms, PodReport, impossible, updated
from outrider_operator.decide.canary.machine import Canary, CanaryPods, Cause
from outrider_operator.decide.canary.pools import Pools
from outrider_operator.decide.pod_states import Pods, revision_of
from outrider_operator.decide.pod_troubles import scheduler_says, unschedulable_since
from outrider_operator.validation.reading import condition_of, cut, integer, items, name_of, text, unix_seconds

_SETTLED_S = 60.0
"""Age of a process from which on it has read its hot config: until then it may not report a canary yet."""
_SILENT_S = 40.0
"""Seconds without a state of a ready pod that make an error: three polls. One may fail on a busy node."""
_LEAST_AGE_S = 60.0
"""Age that sums are judged by at least: clocks of pods may differ."""
_LEAST_USED = 0.02
"""Share of the candidate's (request, step) pairs below which its own drafters count as unused. Exploration alone
takes 1%."""
_MIB = 1 << 20

Trouble = tuple[Cause, str]


@dataclass(frozen=True)
class CanarySight:
    """Everything that is read of the canary's pods at one look."""

    spec: SpeculativeServiceSpec
    pools: Pools
    revision: str
    """Revision of the pods that host both pools; empty where none can."""
    pods: Pods
    states: Mapping[str, RuntimeState]
    """Pod name -> newest state."""
    unreachable: Mapping[str, str]
    """Ready pod -> why its state is not known."""
    refusal: str
    """The API server's sentence about an object of the canary; empty where it took all."""
    products: frozenset[str]
    """Products that the canary has a pod of."""
    hot_hash: str
    """Digest of the hot config that the pods should have."""
    unschedulable_s: float
    """A pod without a node for so long means no capacity."""
    most_tokens: int
    """Tokens that a step may give a request."""
    stable_restarts: int = 0
    """Restarts of a pod that serves, the one with most, since the attempt began."""
    is_late: bool = False
    """Did no pod get ready within rollout.progressDeadline?"""

    def ready_states(self) -> Iterator[tuple[str, RuntimeState]]:
        names = (name_of(pod) for pod in self.pods.ready)
        return ((name, self.states[name]) for name in names if name in self.states)


def canary_pods(sight: CanarySight, before: Canary | None) -> CanaryPods:
    """Observations of the pods of `before` for the state machine."""
    if before is None:
        return CanaryPods()
    sight = replace(sight, pods=_of_revision(sight.pods, sight.revision))
    heeds_missing = sight.spec.rollout.on_missing_drafter is OnMissingDrafter.HOLD
    reports = tuple(_reports(sight, before, heeds_missing=heeds_missing))
    living = frozenset(name_of(pod) for pod in sight.pods.living)
    restarts = updated(before.ledger, reports, living).most_restarts
    return CanaryPods(
        reports=reports,
        living=living,
        products=sight.products,
        trouble=_trouble(sight, before, heeds_missing=heeds_missing) or (None if reports else _silence(sight, before)),
        not_loaded=_missing(sight, sight.pools.own),
        # A candidate that only takes drafters away runs nothing that the stable pool does not run.
        restarts_under_candidate=max(0, restarts - sight.stable_restarts) if sight.pools.own else 0,
        unused=_unused(sight, before),
        out_of_memory=next(map(_out_of_memory, filter(_was_out_of_memory, sight.pods.living)), ""),
    )


def restarts_since(pods: Pods, at: float) -> int:
    """Most restarts of a container of `pods` that has ended since `at` (Unix seconds)."""
    statuses = [status for pod in pods.living for status in items(pod, "status", "containerStatuses")]
    return max((integer(status, "restartCount") for status in statuses if _ended_at(status) >= at), default=0)


def _ended_at(status: Object) -> float:
    return unix_seconds(text(status, "lastState", "terminated", "finishedAt")) or 0.0


def _unused(sight: CanarySight, before: Canary) -> str:
    """Names of the candidate's own drafters, if its requests hardly used them; empty where no pod counts steps."""
    states = [state for _, state in sight.ready_states() if state.canary is not None]
    pairs = sum(sum(state.draft_length_steps) for state in states) * before.candidate_percent / 100.0
    used = sum(
        drafter.request_steps for state in states for drafter in state.drafters if drafter.name in sight.pools.own
    )
    return " and ".join(sight.pools.own) if used < _LEAST_USED * pairs else ""


def _was_out_of_memory(pod: Object) -> bool:
    """Did a container of it last end for want of memory? Two pools in one pod take more than either."""
    statuses = items(pod, "status", "containerStatuses")
    return any(text(status, "lastState", "terminated", "reason") == "OOMKilled" for status in statuses)


def _out_of_memory(pod: Object) -> str:
    return f"Pod {name_of(pod)}, which hosts both pools, was ended for want of memory (OOMKilled)."


def _of_revision(pods: Pods, revision: str) -> Pods:
    """`pods` without those of the candidate before, whose faults are not this one's."""
    living = tuple(pod for pod in pods.living if revision_of(pod) == revision)
    return replace(pods, living=living, ended=tuple(pod for pod in pods.ended if revision_of(pod) == revision))


def _reports(sight: CanarySight, before: Canary, *, heeds_missing: bool) -> Iterator[PodReport]:
    """Sums of this attempt alone, of the products and SLO classes that the spec names: a pod may name any. Of pods that
    lack a drafter there are none: both arms may be one pool there. With onMissingDrafter: Continue the running pool is
    measured as it serves, without what it lacks; a candidate that lacks its own drafter proves nothing."""
    for name, state in sight.ready_states():
        if state.canary is None or state.canary.id != before.attempt:
            continue
        lacking = [drafter for drafter in state.drafters if not drafter.loaded]
        own = {drafter.name for drafter in lacking} & {*sight.pools.own}
        if own or (heeds_missing and lacking) or any(_lacks_memory(drafter) for drafter in lacking):
            continue
        if _impossible(sight, state):
            continue
        product = _product(state.product, sight.spec.accelerator.products)
        yield PodReport(name, product, state.started_at, _arms(sight, state.canary))


def _impossible(sight: CanarySight, state: RuntimeState) -> str:
    """What of a pod's sums no pod can have, in words; empty if all is possible."""
    if state.canary is None:
        return ""
    arms, age_s = _arms(sight, state.canary), max(_LEAST_AGE_S, state.reported_at - state.started_at)
    faults = (impossible(sums, age_s, sight.most_tokens) for sums in (arms.stable, arms.candidate))
    return next(filter(None, faults), "")


def _arms(sight: CanarySight, state: CanaryState) -> Arms:
    bounded = _bounded(state, {slo.name for slo in sight.spec.slo_classes})
    return Arms(bounded.stable, bounded.candidate)


def _bounded(state: CanaryState, classes: set[str]) -> CanaryState:
    def known(arm: ArmCounters) -> ArmCounters:
        finished = {name: count for name, count in arm.finished.items() if name in classes}
        attained = {name: count for name, count in arm.attained.items() if name in classes}
        return arm.model_copy(update={"finished": finished, "attained": attained})

    return state.model_copy(update={"stable": known(state.stable), "candidate": known(state.candidate)})


def _product(reported: str, products: list[str]) -> str:
    return reported if reported in products else products[0]


def _trouble(sight: CanarySight, before: Canary, *, heeds_missing: bool) -> Trouble | None:
    """Why the pods cannot measure, whatever they report."""
    if sight.pools.problem:
        return Cause.CANNOT_HOST_BOTH, sight.pools.problem
    if sight.refusal:
        return Cause.POD_CANNOT_START, sight.refusal
    if (pod := _unschedulable(sight)) is not None:
        said = scheduler_says(pod).rstrip(".") or "the scheduler finds no node"
        return Cause.NO_CAPACITY, f"Pod {name_of(pod)} has no node: {said}."
    if (trouble := sight.pods.trouble()) is not None:
        return Cause.POD_CANNOT_START, f"{trouble.message.rstrip('.')}."
    if said := _scheduling_gates(sight) or _overdue(sight):
        return Cause.POD_CANNOT_START, said
    if said := _no_room(sight):
        return Cause.NO_ROOM_FOR_BOTH, said
    if heeds_missing and (said := _missing(sight, sight.pools.stable)):
        return Cause.STABLE_NOT_LOADED, said
    return _nonsense(sight, before)


def _nonsense(sight: CanarySight, before: Canary) -> Trouble | None:
    """Trouble if a pod reports sums of this attempt that no pod can have. They are never judged."""
    for name, state in sight.ready_states():
        if state.canary is not None and state.canary.id == before.attempt and (words := _impossible(sight, state)):
            return Cause.IMPOSSIBLE_SUMS, f"Pod {name} reports sums that no pod can have: {words}."
    return None


def _scheduling_gates(sight: CanarySight) -> str:
    """A sentence about a pod that nothing has let to the scheduler for long."""
    for pod in sight.pods.living:
        gates = ", ".join(text(gate, "name") for gate in items(pod, "spec", "schedulingGates"))
        created = unix_seconds(text(pod, "metadata", "creationTimestamp")) or 0.0
        if gates and sight.pods.at - created >= sight.unschedulable_s:
            return f"Pod {name_of(pod)} waits for its scheduling gates ({cut(gates, 300)}) to be removed."
    return ""


def _overdue(sight: CanarySight) -> str:
    """A sentence about pods that did not get ready in time, whatever keeps them."""
    if not sight.is_late or sight.pods.ready:
        return ""
    why = sight.pods.why_not_ready().rstrip(".") or "No canary pod was made"
    return f"No canary pod got ready within rollout.progressDeadline ({sight.spec.rollout.progress_deadline}). {why}."


def _unschedulable(sight: CanarySight) -> Object | None:
    """The first pod without a node for long, that no node is being made for."""
    pods = sight.pods
    waiting = ((pod, since) for pod in pods.living if (since := unschedulable_since(pod)) is not None)
    late = (pod for pod, since in waiting if pods.at - since >= sight.unschedulable_s)
    return next((pod for pod in late if not pods.node_in_the_making(pod)), None)


def _silence(sight: CanarySight, before: Canary) -> Trouble | None:
    """Why ready pods report no sums."""
    for name, state in sight.ready_states():
        if state.config_error:
            return Cause.PODS_DO_NOT_ANSWER, f"Pod {name} refuses its config: {state.config_error.rstrip('.')}."
        is_settled = state.reported_at - state.started_at >= _SETTLED_S
        if is_settled and state.config_hash == sight.hot_hash and state.canary is None:
            return Cause.RUNTIME_TOO_OLD, f"Pod {name} runs a runtime that measures no canary."
    began = before.held_since or sight.pods.at
    late = (pod for pod in sight.pods.ready if sight.pods.at - max(began, _ready_since(pod)) >= _SILENT_S)
    silent = sorted(name for pod in late if (name := name_of(pod)) in sight.unreachable)
    if silent:
        why = sight.unreachable[silent[0]].rstrip(".")
        return Cause.PODS_DO_NOT_ANSWER, f"Pod {silent[0]} is ready and does not report its state: {why}."
    return None


def _ready_since(pod: Object) -> float:
    return unix_seconds(text(condition_of(pod, "Ready"), "lastTransitionTime")) or 0.0


def _no_room(sight: CanarySight) -> str:
    """A pod's words about a drafter that memory has no room for, and what the hosted ones take."""
    for name, state in sight.ready_states():
        short = next((drafter for drafter in state.drafters if _lacks_memory(drafter)), None)
        if short is not None:
            taken = ", ".join(_memory_text(drafter) for drafter in state.drafters if drafter.memory is not None)
            hosted = f" It hosts {taken}." if taken else ""
            return f"Pod {name} leaves out drafter {short.name}: {short.reason.rstrip('.')}.{hosted}"
    return ""


def _lacks_memory(drafter: DrafterReport) -> bool:
    said = drafter.reason.lower()
    return not drafter.loaded and any(words in said for words in MEMORY_WORDS)


def _memory_text(drafter: DrafterReport) -> str:
    memory = drafter.memory
    if memory is None:
        return drafter.name
    return f"{drafter.name} with {memory.weight_bytes / _MIB:.0f} MiB of weights"


def _missing(sight: CanarySight, names: Iterable[str]) -> str:
    """A pod's words about a drafter of `names` that it has not loaded for another reason than memory."""
    for pod, state in sight.ready_states():
        reported = {drafter.name: drafter for drafter in state.drafters}
        for name in names:
            drafter = reported.get(name)
            if drafter is not None and not drafter.loaded and not _lacks_memory(drafter):
                return f"Pod {pod}: drafter {name} is not loaded: {drafter.reason.rstrip('.') or 'it says no reason'}."
    return ""
