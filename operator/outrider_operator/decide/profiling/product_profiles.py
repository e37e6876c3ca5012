"""The state of each product's profile: measurements that exist, measurements that are missing, and the active Job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from outrider_crds.base import digest, seconds
from outrider_crds.profile import REPROFILE_ANNOTATION
from outrider_crds.profile_keys import ProfileKeys, has_same_meaning_everywhere
from outrider_crds.spec import CPU_PRODUCT, ProfilingMode

from outrider_operator.cluster_model import Node, Object, ServiceIdentity
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.desired.profile_store import Failure, Store
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.pod_spec.placement import NODE_HOSTNAME, fitting_nodes
from outrider_operator.decide.pod_spec.volumes import profile_name
from outrider_operator.decide.pods.job_pods import is_done, pod_of
from outrider_operator.decide.pods.pod_states import MOST_TOLERATIONS
from outrider_operator.decide.pods.pod_troubles import has_ended
from outrider_operator.decide.profiling.known_profiles import Sources, known_elsewhere, newest
from outrider_operator.decide.profiling.measurement_request import MeasurementRequest, absorb, attempt_hash, request_of
from outrider_operator.validation.reading import annotation, ended, items, name_of, text, unix_seconds
from outrider_operator.validation.reports import PROFILER

MOST_HOSTNAMES = 64
"""Nodes that a Job may name. One of so many becomes free as soon as any, and the manifest stays small."""
_RESULT_PATIENCE_S = 30.0
"""Seconds to wait for a pod's termination message, which may reach the watch after the end of its Job."""


@dataclass(frozen=True)
class ProfilingView:
    """Profiling as one service sees it."""

    world: ServiceWorld
    desired: DesiredState
    sources: Sources

    @property
    def owner(self) -> ServiceIdentity:
        return self.world.children.owner

    def store(self, target_key: str) -> Store:
        """What the service's namespace has measured."""
        return self.sources.own.store(target_key)


@dataclass(frozen=True)
class ProductProfile:
    """Profile of one product: measurements that exist, those that are missing, and the Job for them, if any."""

    keys: ProfileKeys
    store: Store
    """Measurements, including the outcome of a finished Job that is not stored yet."""
    request: MeasurementRequest
    """Measurements that a new Job would make now; empty if none is missing."""
    job: Object | None
    pod: Object | None
    stale: bool
    """Older than profiling.maxAge."""
    node_fits: bool
    hostnames: tuple[str, ...]
    """Nodes that a Job may run on if it must not bring one up; empty if it may, or if nodes cannot be read."""
    served_first: tuple[str, ...]
    """Names of serving pods that need the same cores and are still starting."""

    is_measured_elsewhere: bool
    """True while a Job of another namespace measures what counts here, too."""

    @property
    def job_is_active(self) -> bool:
        return self.job is not None and not is_done(self.job, self.pod, PROFILER)

    @property
    def again_at(self) -> list[float]:
        """Unix times at which what failed is tried again by itself."""
        failures = map(self.failure, (self.keys.target, *self.keys.drafters.values()))
        return [failure.again_at for failure in failures if failure is not None and failure.again_at]

    def failure(self, key: str) -> Failure | None:
        """Why `key` could not be measured under the current settings."""
        return self.store.failure(key, self.request.attempt)


def product_profiles(view: ProfilingView) -> list[ProductProfile]:
    """One entry per product, in the order of the spec."""
    return [_product_profile(view, keys) for keys in view.desired.spec_revision.keys]


def with_nodes(profiles: list[ProductProfile]) -> list[ProductProfile]:
    """The products that pods can be scheduled on now; all products if no node fits any."""
    return [profile for profile in profiles if profile.node_fits] or profiles


def stale_in_s(desired: DesiredState, keys: ProfileKeys, store: Store, at: float) -> float | None:
    """Seconds until a measurement in `keys` exceeds profiling.maxAge: negative if it has, None if it never will."""
    age = desired.spec.profiling.max_age
    drafters = [store.drafters[key] for key in keys.drafters.values() if key in store.drafters]
    measured = [store.target.measured_at] if store.target is not None and store.has_target(keys) else []
    times = [unix_seconds(time) for time in (*measured, *(drafter.measured_at for drafter in drafters))]
    oldest = min((time for time in times if time is not None), default=None)
    return oldest + seconds(age) - at if age is not None and oldest is not None else None


def _product_profile(view: ProfilingView, keys: ProfileKeys) -> ProductProfile:
    world, desired, name = view.world, view.desired, profile_name(keys.target)
    job = next((job for job in world.observed.jobs if name_of(job) == name), None)
    pod = pod_of(job, world.observed.job_pods) if job is not None else None
    store = _with_outcome(view, _with_known(view, keys), job, pod)
    request = _request(view, keys, store)
    is_auto = desired.spec.is_measurable and desired.spec.profiling.mode is ProfilingMode.AUTO
    is_bound = is_auto and (bool(request) or job is not None)
    nodes = _fitting(view, keys.product, pod, None if is_bound else 1)
    left = stale_in_s(desired, keys, store, world.at)
    return ProductProfile(
        keys=keys,
        store=store,
        request=request,
        job=job,
        pod=pod,
        stale=left is not None and left <= 0,
        node_fits=world.observed.nodes is None or bool(nodes),
        hostnames=_hostnames(nodes) if is_bound else (),
        served_first=_served_first(view, keys.product),
        is_measured_elsewhere=name in world.observed.measured_elsewhere and has_same_meaning_everywhere(desired.spec),
    )


def _with_known(view: ProfilingView, keys: ProfileKeys) -> Store:
    """The service's own measurements, and what was measured elsewhere of those that are missing or too old."""
    store = view.store(keys.target)
    age_left_s = stale_in_s(view.desired, keys, store, view.world.at)
    if store.covers(keys) and (age_left_s is None or age_left_s > 0):
        return store
    return newest(store, known_elsewhere(view.sources, view.desired, keys), keys)


def _fitting(view: ProfilingView, product: str, job_pod: Object | None, limit: int | None) -> list[Node]:
    """Up to `limit` nodes that fit `product`, with the tolerations that admission added to pods, as GKE does."""
    admitted = [*view.world.pods.tolerations, *items(job_pod, "spec", "tolerations")[:MOST_TOLERATIONS]]
    spec, nodes = view.desired.spec, view.world.observed.nodes or ()
    return list(islice(fitting_nodes(nodes, spec, product, admitted), limit))


def _hostnames(nodes: list[Node]) -> tuple[str, ...]:
    """Nodes that a Job names. They are chosen by a digest: the same at each reconcile, and spread over zones."""
    names = {node.labels[NODE_HOSTNAME] for node in nodes if NODE_HOSTNAME in node.labels}
    return tuple(sorted(sorted(names, key=digest)[:MOST_HOSTNAMES]))


def _served_first(view: ProfilingView, product: str) -> tuple[str, ...]:
    """Serving pods that start before a Job may run. Only on cpu, where all pods share the cores.

    Two engines that load at once take more than twice as long, and the Job would measure the other one's load. On other
    hardware the scheduler decides by priority.
    """
    deadline_s = seconds(view.desired.spec.rollout.progress_deadline)
    return tuple(map(name_of, view.world.pods.starting(deadline_s))) if product == CPU_PRODUCT else ()


def _with_outcome(view: ProfilingView, store: Store, job: Object | None, pod: Object | None) -> Store:
    if job is None or not is_done(job, pod, PROFILER) or not is_readable(view.world.at, job, pod):
        return store
    request = request_of(job)
    return absorb(store, job, pod, request) if request is not None else store


def is_readable(at: float, job: Object, pod: Object | None) -> bool:
    """True if the Job's pod has ended, or has had enough time to report its result."""
    if pod is not None and (has_ended(pod) or ended(pod, PROFILER)):
        return True
    times = (unix_seconds(text(condition, "lastTransitionTime")) for condition in items(job, "status", "conditions"))
    since = max((time for time in times if time is not None), default=0.0)
    return at - since > _RESULT_PATIENCE_S


def _request(view: ProfilingView, keys: ProfileKeys, store: Store) -> MeasurementRequest:
    """Request the keys that are missing or too old, except those that failed under the same settings."""
    spec, at = view.desired.spec, view.world.at
    annotated = annotation(view.world.observed.service, REPROFILE_ANNOTATION)
    attempt, reprofile = attempt_hash(spec, view.desired.image), digest(annotated) if annotated else ""
    is_reprofiling = bool(reprofile) and reprofile not in store.requests
    max_age_s = seconds(spec.profiling.max_age) if spec.profiling.max_age is not None else math.inf

    def is_missing(key: str, measured_at: str | None) -> bool:
        is_old = measured_at is None or at - (unix_seconds(measured_at) or at) >= max_age_s
        failure = store.failure(key, attempt)
        return is_reprofiling or (is_old and (failure is None or 0 < failure.again_at <= at))

    target_time = store.target.measured_at if store.target is not None and store.has_target(keys) else None
    target = is_missing(keys.target, target_time)
    # A drafter's cost is useless without its target, and drafters cannot be measured if the target does not start.
    usable = target or target_time is not None
    times = {name: store.drafters[key].measured_at for name, key in keys.drafters.items() if key in store.drafters}
    drafters = [name for name, key in keys.drafters.items() if usable and is_missing(key, times.get(name))]
    return MeasurementRequest(keys=keys, target=target, drafters=tuple(drafters), attempt=attempt, reprofile=reprofile)
