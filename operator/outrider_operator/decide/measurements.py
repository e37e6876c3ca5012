"""What is still to be measured, and the life of the Jobs that do it: store, delete, give way, create."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.base import digest, seconds
from outrider_crds.profile import REPROFILE_ANNOTATION, ProfileKeys
from outrider_crds.spec import ProfilingMode

from outrider_operator.decide.intent import Intent, store_of
from outrider_operator.decide.job_manifest import Asked, asked_of, attempt_hash, job_manifest
from outrider_operator.decide.job_outcome import absorb, has_ended, is_finished, is_running, pod_of
from outrider_operator.decide.ownership import owner_reference, owner_uids
from outrider_operator.decide.placement import labels_match, node_fits, tolerates
from outrider_operator.decide.pod_template import PRODUCTS_ANNOTATION
from outrider_operator.decide.pods import unschedulable_since
from outrider_operator.decide.profile_store import Store
from outrider_operator.decide.reading import (
    annotation,
    is_being_deleted,
    items,
    mapping,
    name_of,
    uid_of,
    unix_seconds,
)
from outrider_operator.decide.volumes import profile_name
from outrider_operator.model import JOB, Adoption, Delete, Object, Observed, Settings

_RESULT_PATIENCE_S = 30.0
"""The pod's last words may reach the watch later than the end of its Job."""
_WORDS_S = 2.0
_STORE_S = 0.5
"""What the operator writes itself wakes nobody: look again when a result is stored, or a Job made room for another."""


@dataclass(frozen=True)
class Measurement:
    """One product's profile: what is there, what is missing, and the Job for it, if there is one."""

    keys: ProfileKeys
    store: Store
    """With the outcome of a finished Job, whether that is stored yet or not."""
    asked: Asked
    """What a new Job would measure now; empty when nothing is to be done."""
    job: Object | None
    pod: Object | None
    stale: bool
    """Older than profiling.maxAge."""
    node_fits: bool
    served_first: tuple[str, ...]
    """Names of serving pods that wait for the same accelerator."""

    @property
    def job_is_active(self) -> bool:
        return self.job is not None and not is_finished(self.job)


@dataclass(frozen=True)
class JobPlan:
    create: tuple[Object, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    delete: tuple[Delete, ...] = ()
    requeue_after_s: float | None = None


def measurements(observed: Observed, intent: Intent) -> list[Measurement]:
    """One entry per product, in the order of the spec."""
    return [_measurement(observed, intent, keys) for keys in intent.wanted.keys]


def plan_jobs(observed: Observed, settings: Settings, intent: Intent, found: list[Measurement]) -> JobPlan:
    """Deletes and creations of Jobs. A finished one goes only once its outcome stands in the ConfigMap."""
    leave = _leave(observed, intent)
    deletes, adopts = [*leave.delete], [*leave.adopt]
    creates: list[Object] = []
    waits: list[float] = []
    for each in found:
        if each.job is None:
            if _may_start(observed, intent, each):
                creates.append(job_manifest(observed, settings, intent.spec, intent.image, each.asked))
        elif is_being_deleted(each.job):
            continue
        elif is_finished(each.job):
            if _is_stored(observed, each):
                deletes.append(_deletion(each.job))
            else:
                waits.append(_STORE_S if _is_readable(observed, each.job, each.pod) else _WORDS_S)
        elif _must_stop(observed, intent, each):
            deletes.append(_deletion(each.job))
        elif observed.uid not in owner_uids(each.job):
            owner = owner_reference(observed, controller=False)
            adopts.append(Adoption(JOB, name_of(each.job), uid_of(each.job), owner))
    if deletes:
        waits.append(_STORE_S)
    return JobPlan(tuple(creates), tuple(adopts), tuple(deletes), min(waits, default=None))


def reprofile_request(observed: Observed) -> str:
    """Digest of the annotation that asks for new measurements; empty without it."""
    value = annotation(observed.service, REPROFILE_ANNOTATION)
    return digest(value) if value else ""


def stale_in_s(intent: Intent, store: Store, now: float) -> float | None:
    """Seconds until the oldest part of the profile passes profiling.maxAge (negative: it has); None without one."""
    if intent.spec.profiling.max_age is None or store.target is None:
        return None
    measured = [store.target.measured_at, *(drafter.measured_at for drafter in store.drafters.values())]
    times = [unix_seconds(time) for time in measured]
    oldest = min((time for time in times if time is not None), default=now)
    return oldest + seconds(intent.spec.profiling.max_age) - now


def _measurement(observed: Observed, intent: Intent, keys: ProfileKeys) -> Measurement:
    job = next((job for job in observed.jobs if name_of(job) == profile_name(keys.target)), None)
    pod = pod_of(job, observed.job_pods) if job is not None else None
    store = _with_outcome(observed, store_of(observed, keys.target), job, pod)
    return Measurement(
        keys=keys,
        store=store,
        asked=_asked(observed, intent, keys, store),
        job=job,
        pod=pod,
        stale=(left := stale_in_s(intent, store, observed.now)) is not None and left <= 0,
        node_fits=observed.nodes is None or any(node_fits(n, intent.spec, keys.product) for n in observed.nodes),
        served_first=tuple(name_of(pod) for pod in _waiting(observed, keys.product)),
    )


def _with_outcome(observed: Observed, store: Store, job: Object | None, pod: Object | None) -> Store:
    if job is None or not is_finished(job) or not _is_readable(observed, job, pod):
        return store
    asked = asked_of(job)
    return absorb(store, job, pod, asked) if asked is not None else store


def _is_readable(observed: Observed, job: Object, pod: Object | None) -> bool:
    """True when the Job's pod has said its last words, or has had time enough to."""
    if pod is not None and has_ended(pod):
        return True
    ended = [unix_seconds(str(c.get("lastTransitionTime"))) for c in items(job, "status", "conditions")]
    since = max((time for time in ended if time is not None), default=0.0)
    return observed.now - since > _RESULT_PATIENCE_S


def _is_stored(observed: Observed, each: Measurement) -> bool:
    """True when absorbing the outcome of the finished Job changes nothing."""
    assert each.job is not None
    readable = _is_readable(observed, each.job, each.pod)
    return readable and store_of(observed, each.keys.target) == each.store


def _asked(observed: Observed, intent: Intent, keys: ProfileKeys, store: Store) -> Asked:
    """The keys that are missing or out of date, less those that failed under the same settings."""
    attempt = attempt_hash(intent.spec, intent.image)
    request = reprofile_request(observed)
    wanted_anew = bool(request) and request not in store.requests

    def wanted(key: str, measured_at: str | None) -> bool:
        if wanted_anew:
            return True
        outdated = measured_at is None or _is_old(intent, measured_at, observed.now)
        return outdated and store.failure(key, attempt) is None

    target_time = store.target.measured_at if store.target is not None and store.has_target(keys) else None
    target = wanted(keys.target, target_time)
    # Without its target a drafter's cost is of no use, and a target that does not start has no drafters to measure.
    usable = target or target_time is not None
    times = {name: store.drafters[key].measured_at for name, key in keys.drafters.items() if key in store.drafters}
    drafters = [name for name, key in keys.drafters.items() if usable and wanted(key, times.get(name))]
    return Asked(keys=keys, target=target, drafters=tuple(drafters), attempt=attempt, request=request)


def _is_old(intent: Intent, measured_at: str, now: float) -> bool:
    time, age = unix_seconds(measured_at), intent.spec.profiling.max_age
    return age is not None and time is not None and now - time >= seconds(age)


def _may_start(observed: Observed, intent: Intent, each: Measurement) -> bool:
    required = intent.spec.profiling.mode is ProfilingMode.REQUIRED
    return (
        bool(each.asked)
        and intent.spec.profiling.mode is not ProfilingMode.SKIP
        and not intent.spec.paused
        and (each.node_fits or required)  # the pending pod of a required measurement may bring a node up
        and not each.served_first
        and _serving_pods_are_placed(observed, intent)
    )


def _serving_pods_are_placed(observed: Observed, intent: Intent) -> bool:
    """False in the moment between a change of the Deployment and its pods, which are to be scheduled first."""
    if intent.spec.replicas == 0 or intent.running is None:
        return True
    deployment = observed.deployment
    if deployment is None:
        return False
    seen = mapping(deployment, "status").get("observedGeneration", 0)
    created = mapping(deployment, "status").get("replicas", 0)
    return bool(seen == mapping(deployment, "metadata").get("generation", 0) and created >= intent.spec.replicas)


def _must_stop(observed: Observed, intent: Intent, each: Measurement) -> bool:
    """Active Jobs stop when a serving pod cannot be placed, when profiling is switched off, or when the settings of
    one that could not even start were changed. Another service's Job is only stopped for a serving pod."""
    assert each.job is not None
    if any(unschedulable_since(pod) is not None for pod in _waiting(observed, each.keys.product)):
        return True
    if owner_uids(each.job) - {observed.uid}:
        return False
    if intent.spec.paused or intent.spec.profiling.mode is ProfilingMode.SKIP:
        return True
    asked = asked_of(each.job)
    changed = asked is None or asked.attempt != attempt_hash(intent.spec, intent.image)
    return changed and not is_running(each.pod)


def _waiting(observed: Observed, product: str) -> list[Object]:
    """Serving pods that wait for a node of `product`, if there is one that they could ever use."""
    return [
        pod
        for pod in observed.waiting_pods
        if product in annotation(pod, PRODUCTS_ANNOTATION).split(",")
        and not is_being_deleted(pod)
        and _could_run(observed, pod)
    ]


def _could_run(observed: Observed, pod: Object) -> bool:
    """A pod that no node matches (a wrong nodeSelector) must not keep Jobs away for ever."""
    wanted, tolerations = mapping(pod, "spec", "nodeSelector"), items(pod, "spec", "tolerations")
    nodes = observed.nodes
    return nodes is None or any(labels_match(node, wanted) and tolerates(node, tolerations) for node in nodes)


def _leave(observed: Observed, intent: Intent) -> JobPlan:
    """Jobs that this service asks for no more: the last user deletes, the others take their name off.

    Two that leave in one moment may leave a Job without any owner: whoever sees it next deletes it.
    """
    wanted = {profile_name(keys.target) for keys in intent.wanted.keys}
    others = [job for job in observed.jobs if name_of(job) not in wanted and not is_being_deleted(job)]
    left = [job for job in others if observed.uid in owner_uids(job)]
    alone = [job for job in others if owner_uids(job) <= {observed.uid}]
    release = {"$patch": "delete", "uid": observed.uid}
    return JobPlan(
        adopt=tuple(Adoption(JOB, name_of(job), uid_of(job), release) for job in left if job not in alone),
        delete=tuple(_deletion(job) for job in alone),
    )


def _deletion(job: Object) -> Delete:
    return Delete(JOB, name_of(job), uid_of(job))
