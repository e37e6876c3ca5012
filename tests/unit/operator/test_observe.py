"""One look at a service: what it asks the API server for, beyond what the watches bring."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from outrider_operator import kinds
from outrider_operator.cluster.api_error import ApiError
from outrider_operator.cluster.cache import ObjectCache
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.cluster.serving_pods import ServingPods
from outrider_operator.cluster_model import JOB_NAME_LABEL, PREFETCH, PROFILING, SHARED_PROFILE, Object
from outrider_operator.controller.child_reader import current_warning, node_in_the_making
from outrider_operator.controller.observe import Observer
from outrider_operator.decide import decide
from outrider_operator.decide.ownership import labels
from outrider_operator.decide.pods.job_pods import pod_of
from outrider_operator.service_metrics.measurements import Measurements
from outrider_operator.validation.reading import name_of

from tests.unit.operator.decide.world import SETTINGS, manifest, settings_with
from tests.unit.operator.documents import deployment, document, pod, replica_set
from tests.unit.operator.documents import labels as document_labels


class Api:
    """Has Events and at most one ConfigMap, and records requests."""

    def __init__(self, config_map: Object | None = None, error: Exception | None = None) -> None:
        self._error = error
        self.asked: list[str] = []
        self.events: list[Object] = [{"type": "Warning", "reason": "FailedMount", "message": "no such volume"}]
        self._config_map = config_map

    async def get(self, kind: kinds.ResourceKind, namespace: str, name: str) -> Object | None:
        del namespace
        self.asked.append(f"{kind.kind} {name}")
        stored = self._config_map
        return stored if stored is not None and (kind, name) == (kinds.CONFIG_MAP, name_of(stored)) else None

    async def serves(self, kind: kinds.ResourceKind) -> bool:
        return kind in (kinds.INFERENCE_POOL, kinds.LEADER_WORKER_SET)

    async def some(self, kind: kinds.ResourceKind, namespace: str, *, fields: str = "", pages: int = 1) -> list[Object]:
        del fields
        self.asked.append(kind.kind)
        if self._error is not None:
            raise self._error
        if kind == kinds.NETWORK_POLICY:
            metadata = {"name": "deny", "namespace": namespace}
            return [{"metadata": metadata, "spec": {"x": "x" * size}} for size in (1, 10**6)][:pages]
        return self.events


@pytest.mark.parametrize(("age_s", "event_reads"), [(1, 0), (60, 1)])
async def test_events_are_read_only_of_pods_that_are_late(age_s: float, event_reads: int) -> None:
    """Each rollout read the Events of each new pod, which has a container moments later."""
    api, cache = Api(), ObjectCache()
    observer = _observer(api, cache)
    for kind, child in (
        (kinds.DEPLOYMENT, deployment()),
        (kinds.REPLICA_SET, replica_set()),
        (kinds.POD, _created(age_s)),
    ):
        cache.seen(kind, child)
    observed = await observer.observe(_service(), ())
    assert api.asked.count(kinds.EVENT.kind) == event_reads
    assert len(observed.pods) == 1
    assert len(observed.warnings) == event_reads


@pytest.mark.parametrize(("conditions", "event_reads"), [([], 1), ([{"type": "Complete", "status": "True"}], 0)])
@pytest.mark.parametrize("component", [PROFILING, PREFETCH])
async def test_events_of_a_job_without_a_pod_are_read(
    conditions: list[Object], event_reads: int, component: str
) -> None:
    """A quota on pods: nothing but the Job's own Events says why it does not begin."""
    job = document("outrider-profile-x", 3) | {"status": {"conditions": conditions}}
    job["metadata"]["labels"] = labels("chat", component)
    api, cache = Api(), ObjectCache()
    cache.seen(kinds.JOB, job)
    observed = await _observer(api, cache).observe(_service(), ())
    assert list(observed.warnings) == ["outrider-profile-x"] * event_reads


async def test_a_look_goes_through_the_pods_of_jobs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 suspended Jobs and as many pods, made by a tenant, were two million comparisons a look."""
    cache, walked = ObjectCache(), list[Object]()
    for number in range(20):
        job, its_pod = document(f"outrider-profile-{number}", 3), document(f"pod-{number}", 3)
        job["metadata"]["labels"] = labels("chat", PROFILING)
        marks = {**labels("chat", PROFILING), JOB_NAME_LABEL: job["metadata"]["name"]}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "x", "uid": "x", "controller": True}
        its_pod["metadata"] |= {"labels": marks, "ownerReferences": [owner]}
        cache.seen(kinds.JOB, job)
        cache.seen(kinds.POD, its_pod)

    def noting(job: Object, pods: list[Object]) -> Object | None:
        walked.extend(pods)
        return pod_of(job, pods)

    monkeypatch.setattr("outrider_operator.controller.child_reader.pod_of", noting)
    await _observer(Api(), cache).observe(_service(), ())
    assert len(walked) == 20


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionResetError(), ApiError(403, "Forbidden", "no")])
async def test_events_that_cannot_be_read_end_no_look(error: Exception) -> None:
    """A time-out had the whole reconcile tried again, without a plan, of just the services in trouble."""
    api, cache = Api(error=error), ObjectCache()
    observer = _observer(api, cache)
    for kind, child in (
        (kinds.DEPLOYMENT, deployment()),
        (kinds.REPLICA_SET, replica_set()),
        (kinds.POD, _created(60)),
    ):
        cache.seen(kind, child)
    observed = await observer.observe(_service(), ())
    assert api.asked.count(kinds.EVENT.kind) == 1
    assert observed.warnings == {}


async def test_the_policies_of_a_namespace_are_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of up to seven looks of each service with a silent pod listed them, and saw the first 25 only. One of a
    megabyte must not be kept."""
    api, cache = Api(), ObjectCache()
    observer = _observer(api, cache)
    monkeypatch.setattr(Measurements, "unreachable", lambda *_: {"pod": "silent"})
    for _ in range(3):
        observed = await observer.observe(_service(), ())
        assert [len(child["spec"]["x"]) for child in observed.network_policies] == [1]
    assert api.asked.count(kinds.NETWORK_POLICY.kind) == 1


async def test_what_went_before_it_was_read_is_forgotten() -> None:
    """Else each look would ask for it again, until the watch brings its end."""
    api, cache = Api(), ObjectCache()
    cache.seen(kinds.CONFIG_MAP, document("chat-hot", 3) | {"kind": "PartialObjectMetadata"})
    await _observer(api, cache).read("ns", ["chat-hot"])
    assert api.asked == ["ConfigMap chat-hot"]
    assert cache.get(kinds.CONFIG_MAP, "ns", "chat-hot") is None


@pytest.mark.parametrize("owners", [[], [{"apiVersion": "v1", "kind": "Pod", "uid": "chat-uid", "controller": True}]])
async def test_empty_config_map_is_not_read_again_for_ever(owners: list[Object]) -> None:
    """Typed in by hand, without `data`: it looked like one whose contents were not shown yet."""
    hot = document("chat-hot", 3) | {"kind": kinds.CONFIG_MAP.kind}
    hot["metadata"] |= {"ownerReferences": owners, "labels": labels("chat")}
    api, cache = Api(hot), ObjectCache()
    cache.seen(kinds.CONFIG_MAP, hot | {"kind": "PartialObjectMetadata"})
    plan = decide(await _observer(api, cache).observe(_service(), ()), SETTINGS)
    assert api.asked.count("ConfigMap chat-hot") == 1
    assert not plan.read
    assert "chat-hot" in [child["metadata"]["name"] for child in plan.apply]


@pytest.mark.parametrize(
    ("reason", "is_looked_for"), [("Pending", True), ("PoolCurrent", True), ("NotRequested", False)]
)
async def test_pool_is_looked_for_until_none_is_left(reason: str, is_looked_for: bool) -> None:
    """One that could not be deleted at first was forgotten, and gateways went on to route by it."""
    api = Api()
    condition = {"type": "InferencePoolReady", "status": "Unknown", "reason": reason, "message": "m"}
    condition["lastTransitionTime"] = "2026-11-21T12:00:00Z"
    await _observer(api, ObjectCache()).observe({**_service(), "status": {"conditions": [condition]}}, ())
    assert ("InferencePool chat" in api.asked) is is_looked_for


def _observer(api: Api, cache: ObjectCache, trusted: tuple[str, ...] = ("platform", "ns")) -> Observer:
    pods = ServingPods(cache)
    measurements = Measurements(cache, pods, lambda _: None, None, 60.0)
    settings = settings_with(namespace="outrider-system", profiling_shared_from=trusted)
    return Observer(cast(KubernetesApi, api), cache, measurements, settings)


def _service() -> Object:
    metadata = {"name": "chat", "namespace": "ns", "uid": "chat-uid", "resourceVersion": "1", "generation": 1}
    return {**manifest(), "metadata": metadata, "kind": kinds.SERVICE.kind}


def _created(age_s: float) -> dict[str, Any]:
    """A pod on a node, without a container so far."""
    fresh = pod("new", ready=False)
    moment = datetime.fromtimestamp(time.time() - age_s, UTC)
    fresh["metadata"]["creationTimestamp"] = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    fresh["status"] = {"phase": "Pending"}
    return fresh


def _event(reason: str, second: int, kind: str = "Warning", **times: str) -> Object:
    times = times or {"lastTimestamp": f"2026-11-21T12:00:{second:02}Z"}
    return {"type": kind, "reason": reason, "message": "said", **times}


PLACED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-21T12:00:20Z"}
PULLING = _event("Pulling", 22, "Normal")


@pytest.mark.parametrize(
    ("events", "warning"),
    [
        ([_event("FailedScheduling", 10)], ""),
        ([_event("FailedScheduling", 30)], ""),
        ([_event("FailedScheduling", 10), PULLING], ""),
        ([_event("FailedCreatePodSandBox", 19)], ""),
        ([_event("FailedMount", 21), PULLING], ""),
        ([_event("FailedMount", 22), PULLING], "FailedMount: said"),
        ([PULLING, _event("FailedMount", 40)], "FailedMount: said"),
        ([_event("FailedMount", 0, eventTime="2026-11-21T12:00:20.000001Z")], "FailedMount: said"),
        ([], ""),
    ],
)
def test_a_warning_that_a_pod_has_left_behind_counts_no_more(events: list[Object], warning: str) -> None:
    """A pod that waited for its node to be made "could not start: 0/12 nodes" during a pull of 10 GB."""
    its_pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": {"conditions": [PLACED]}}
    assert current_warning(events, its_pod) == warning


def test_a_warning_of_a_job_without_a_pod_stands() -> None:
    """A quota on pods, until a pod can be made."""
    job: Object = {"metadata": {"name": "j"}, "status": {}}
    events = [_event("FailedCreate", 10), _event("Suspended", 5, "Normal")]
    assert current_warning(events, job) == "FailedCreate: said"
    assert current_warning([*events, _event("SuccessfulCreate", 11, "Normal")], job) == ""


KARPENTER = {"reportingComponent": "karpenter"}


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([], ""),
        ([_event("FailedScheduling", 30)], ""),
        ([_event("FailedScheduling", 30), _event("TriggeredScaleUp", 10, "Normal")], "TriggeredScaleUp: said"),
        ([_event("Nominated", 10, "Normal") | KARPENTER], "Nominated: said"),
        ([_event("TriggeredScaleUp", 10, "Normal"), _event("NotTriggerScaleUp", 20, "Normal")], ""),
        ([_event("Nominated", 10, "Normal") | KARPENTER, _event("FailedScheduling", 20) | KARPENTER], ""),
        (
            [_event("NotTriggerScaleUp", 10, "Normal"), _event("TriggeredScaleUp", 20, "Normal")],
            "TriggeredScaleUp: said",
        ),
    ],
)
def test_the_newest_word_of_an_autoscaler_says_if_a_node_is_made(events: list[Object], sentence: str) -> None:
    """Scheduler and Karpenter say FailedScheduling alike; what the scheduler says is no word about nodes to come."""
    assert node_in_the_making(events, {"metadata": {"name": "p"}}) == sentence


async def test_events_of_a_pod_without_a_node_are_read() -> None:
    """No watch brings them."""
    api, cache = Api(), ObjectCache()
    pending = _created(60)
    del pending["spec"]["nodeName"]
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pending["status"] = {"phase": "Pending", "conditions": [scheduled]}
    for kind, child in ((kinds.DEPLOYMENT, deployment()), (kinds.REPLICA_SET, replica_set()), (kinds.POD, pending)):
        cache.seen(kind, child)
    api.events = [_event("TriggeredScaleUp", 10, "Normal")]
    observed = await _observer(api, cache).observe(_service(), ())
    assert list(observed.provisioning.values()) == ["TriggeredScaleUp: said"]
    assert observed.warnings == {}


async def test_a_service_with_the_name_of_the_groups_is_read() -> None:
    """It has no label of Outrider's, or another service's, so nothing else brings it."""
    api, service = Api(), _service()
    service["spec"]["engine"] = {"nodes": 2, "tensorParallelSize": 2}
    cache = ObjectCache()
    cache.seen(kinds.KUBERNETES_SERVICE, document("chat-nodes", 1))
    observed = await _observer(api, cache).observe(service, ())
    assert "LeaderWorkerSet chat-nodes" in api.asked
    assert observed.children["Service", "chat-nodes"]["metadata"]["name"] == "chat-nodes"
    await _observer(api, ObjectCache()).observe(service, ())
    assert "Service chat-nodes" in api.asked


async def test_shared_profiles_are_those_of_the_operators_namespace() -> None:
    """A tenant's ConfigMap with their name and labels would have set every other tenant's step times."""
    cache = ObjectCache()
    for namespace in ("outrider-system", "tenant", "ns"):
        forged = document("outrider-shared-profile-a", 1, namespace, uid=namespace)
        forged["metadata"] |= {"labels": document_labels(None, SHARED_PROFILE), "ownerReferences": []}
        cache.seen(kinds.CONFIG_MAP, forged)
    observed = await _observer(Api(), cache).observe(_service(), ())
    (name,) = observed.shared_profiles
    assert name == "outrider-profile-a"
    assert observed.shared_profiles[name]["metadata"]["namespace"] == "outrider-system"
    assert observed.profiles == {}


@pytest.mark.parametrize(
    ("namespace", "age_s", "status", "is_awaited"),
    [
        ("platform", 60, {}, True),
        ("platform", 3600, {}, False),
        ("platform", 60, {"conditions": [{"type": "Failed", "status": "True"}]}, False),
        ("tenant", 60, {}, False),
        ("ns", 60, {}, False),
    ],
)
async def test_only_the_platforms_jobs_are_awaited(
    namespace: str, age_s: float, status: Object, is_awaited: bool
) -> None:
    """A tenant's Job of that name, or one that waits for a GPU for an hour, would have stopped the others."""
    cache, job = ObjectCache(), document("outrider-profile-a", 1, namespace, status=status)
    created = datetime.fromtimestamp(time.time() - age_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    job["metadata"] |= {"labels": document_labels(None, PROFILING), "creationTimestamp": created}
    cache.seen(kinds.JOB, job)
    observed = await _observer(Api(), cache).observe(_service(), ())
    assert observed.measured_elsewhere == (frozenset({"outrider-profile-a"}) if is_awaited else frozenset())


@pytest.mark.parametrize(
    ("own_age_s", "other", "is_awaited"),
    [
        (60, "aa-platform", True),
        (60, "platform", False),
        (90, "aa-platform", False),
        (30, "platform", True),
        (905, "platform", False),
    ],
)
async def test_of_two_platforms_jobs_the_first_measures(own_age_s: float, other: str, is_awaited: bool) -> None:
    """Both waited for each other, or neither did. Of Jobs of one second, the namespace's name decides.

    A Job that had waited for 15 minutes lost its place: two namespaces deleted each other's pending Jobs in turn.
    """
    cache, at = ObjectCache(), time.time() // 1
    for namespace, age_s in (("ns", own_age_s), (other, 60)):
        job = document("outrider-profile-a", 1, namespace, uid=namespace)
        created = datetime.fromtimestamp(at - age_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        job["metadata"] |= {"labels": document_labels(None, PROFILING), "creationTimestamp": created}
        cache.seen(kinds.JOB, job)
    observed = await _observer(Api(), cache, ("ns", other)).observe(_service(), ())
    assert bool(observed.measured_elsewhere) is is_awaited
