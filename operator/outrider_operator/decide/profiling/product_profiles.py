"""What is measured for each product, what is still to be, and the Job that does it now."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from outrider_crds.base import digest, seconds
from outrider_crds.profile import ProfileKeys, has_same_meaning_everywhere
from outrider_crds.spec import CPU_PRODUCT, ProfilingMode

from outrider_operator.decide.intent import Intent
from outrider_operator.decide.pod_spec.placement import NODE_HOSTNAME, all_tolerations, fitting_nodes
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pods import MOST_TOLERATIONS, Pods
from outrider_operator.decide.profile_store import Failure, Profiles, Store
from outrider_operator.decide.profiling.asked import Asked, asked_of, attempt_hash
from outrider_operator.decide.profiling.job_outcome import absorb, has_ended, is_finished, pod_of
from outrider_operator.decide.profiling.known_profiles import Sources, known_elsewhere, newest
from outrider_operator.inbound.reading import items, name_of, unix_seconds
from outrider_operator.model import Identity, Node, Object

MOST_HOSTNAMES = 64
"""Nodes that a Job names: one of so many becomes free as soon as any, and its manifest stays small."""
_RESULT_PATIENCE_S = 30.0
"""The pod's last words may reach the watch later than the end of its Job."""


@dataclass(frozen=True)
class ProfilingView:
    """What a service sees of profiling: its namespace's Jobs and profiles, and where a Job could run."""

    owner: Identity
    now: float
    """Unix seconds."""
    pods: Pods
    """The service's serving pods."""
    nodes: tuple[Node, ...] | None = ()
    """None where the operator may not read nodes."""
    jobs: tuple[Object, ...] = ()
    job_pods: tuple[Object, ...] = ()
    sources: Sources = field(default_factory=Sources)
    measured_elsewhere: frozenset[str] = frozenset()
    """Names of Jobs that run in namespaces whose measurements all namespaces use."""
    request: str = ""
    """Value of the annotation that asks for new measurements."""

    @property
    def profiles(self) -> Profiles:
        """The namespace's."""
        return self.sources.own

    def store(self, target_key: str) -> Store:
        return self.profiles.store(target_key)


@dataclass(frozen=True)
class ProductProfile:
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
    hostnames: tuple[str, ...]
    """Nodes that a Job may run on where it must bring none up; empty where it may, or where no node can be seen."""
    served_first: tuple[str, ...]
    """Names of serving pods that need the same cores and have not got them yet."""

    is_measured_elsewhere: bool
    """True while a Job of another namespace measures what counts here, too."""

    @property
    def job_is_active(self) -> bool:
        return self.job is not None and not is_finished(self.job)

    def failure(self, key: str) -> Failure | None:
        """Why `key` could not be measured under the present settings."""
        return self.store.failure(key, self.asked.attempt)


def product_profiles(view: ProfilingView, intent: Intent) -> list[ProductProfile]:
    """One entry per product, in the order of the spec."""
    return [_product_profile(view, intent, keys) for keys in intent.wanted.keys]


def with_nodes(found: list[ProductProfile]) -> list[ProductProfile]:
    """The products that pods can land on now; all of them where no node fits any."""
    return [profile for profile in found if profile.node_fits] or found


def stale_in_s(intent: Intent, keys: ProfileKeys, store: Store, now: float) -> float | None:
    """Seconds until a part of the profile named in `keys` passes profiling.maxAge (negative: it has); None: never."""
    age = intent.spec.profiling.max_age
    drafters = [store.drafters[key] for key in keys.drafters.values() if key in store.drafters]
    measured = [store.target.measured_at] if store.target is not None and store.has_target(keys) else []
    times = [unix_seconds(time) for time in (*measured, *(drafter.measured_at for drafter in drafters))]
    oldest = min((time for time in times if time is not None), default=None)
    return oldest + seconds(age) - now if age is not None and oldest is not None else None


def _product_profile(view: ProfilingView, intent: Intent, keys: ProfileKeys) -> ProductProfile:
    job = next((job for job in view.jobs if name_of(job) == profile_name(keys.target)), None)
    pod = pod_of(job, view.job_pods) if job is not None else None
    store = _with_outcome(view, _with_known(view, intent, keys), job, pod)
    request = _asked(view, intent, keys, store)
    is_bound = intent.spec.profiling.mode is ProfilingMode.AUTO and (bool(request) or job is not None)
    nodes = _fitting(view, intent, keys.product, pod, None if is_bound else 1)
    return ProductProfile(
        keys=keys,
        store=store,
        asked=request,
        job=job,
        pod=pod,
        stale=(left := stale_in_s(intent, keys, store, view.now)) is not None and left <= 0,
        node_fits=view.nodes is None or bool(nodes),
        hostnames=_hostnames(nodes) if is_bound else (),
        served_first=tuple(name_of(pod) for pod in _served_first(view, intent, keys.product)),
        is_measured_elsewhere=(
            profile_name(keys.target) in view.measured_elsewhere and has_same_meaning_everywhere(intent.spec)
        ),
    )


def _with_known(view: ProfilingView, intent: Intent, keys: ProfileKeys) -> Store:
    """The service's own measurements, and what was measured elsewhere of those that are missing or too old."""
    store = view.store(keys.target)
    age_left_s = stale_in_s(intent, keys, store, view.now)
    if store.covers(keys) and (age_left_s is None or age_left_s > 0):
        return store
    return newest(store, known_elsewhere(view.sources, intent, keys), keys)


def _fitting(
    view: ProfilingView, intent: Intent, product: str, job_pod: Object | None, limit: int | None
) -> list[Node]:
    """Nodes for `product`, of which the decision needs `limit`; each decision looks through them once."""
    tolerations = all_tolerations(intent.spec, _admitted(view, job_pod))
    return list(islice(fitting_nodes(view.nodes or (), intent.spec, product, tolerations), limit))


def _hostnames(nodes: list[Node]) -> tuple[str, ...]:
    """Drawn by a digest, so that the choice is the same at each look and falls on no zone in particular."""
    names = {node.labels[NODE_HOSTNAME] for node in nodes if NODE_HOSTNAME in node.labels}
    return tuple(sorted(sorted(names, key=digest)[:MOST_HOSTNAMES]))


def _admitted(view: ProfilingView, job_pod: Object | None) -> list[Object]:
    """Tolerations that admission gave to the pods (GKE does, for GPUs)."""
    return [*view.pods.tolerations, *items(job_pod, "spec", "tolerations")[:MOST_TOLERATIONS]]


def _served_first(view: ProfilingView, intent: Intent, product: str) -> list[Object]:
    """On cpu, where everyone shares the cores, pods that start: two engines that load at once take more than twice as
    long, and what would be measured is the other one's load. For any other hardware the scheduler decides, by
    priority."""
    return view.pods.starting(seconds(intent.spec.rollout.progress_deadline)) if product == CPU_PRODUCT else []


def _with_outcome(view: ProfilingView, store: Store, job: Object | None, pod: Object | None) -> Store:
    if job is None or not is_finished(job) or not is_readable(view.now, job, pod):
        return store
    asked = asked_of(job)
    return absorb(store, job, pod, asked) if asked is not None else store


def is_readable(now: float, job: Object, pod: Object | None) -> bool:
    """True when the Job's pod has said its last words, or has had time enough to."""
    if pod is not None and has_ended(pod):
        return True
    ended = [unix_seconds(str(c.get("lastTransitionTime"))) for c in items(job, "status", "conditions")]
    since = max((time for time in ended if time is not None), default=0.0)
    return now - since > _RESULT_PATIENCE_S


def _asked(view: ProfilingView, intent: Intent, keys: ProfileKeys, store: Store) -> Asked:
    """The keys that are missing or out of date, less those that failed under the same settings."""
    attempt = attempt_hash(intent.spec, intent.image)
    request = digest(view.request) if view.request else ""
    wanted_anew = bool(request) and request not in store.requests

    def wanted(key: str, measured_at: str | None) -> bool:
        if wanted_anew:
            return True
        outdated = measured_at is None or _is_old(intent, measured_at, view.now)
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
