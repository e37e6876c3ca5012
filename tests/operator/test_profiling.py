"""Profiling Jobs: one per product and only for what is missing; shared, stored, and out of the way of serving."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest
from outrider_crds.profile import REPROFILE_ANNOTATION, TARGET_FILE, TargetProfile
from outrider_crds.runtime_config import PRODUCT_ANNOTATION
from outrider_operator.kinds import CONFIG_MAP, JOB, SERVICE
from outrider_operator.validation.reading import annotation
from pydantic import ValidationError

from tests.cluster import audit
from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import PRODUCTS
from tests.operator.client import Client, Service, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.manifests import BLOCK, EAGLE, LOOKUP, MTP, on_gpu
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster

H200, A100, L4 = PRODUCTS
NOWHERE = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["nowhere"]}]}]
    }
}
SHARED_TARGET = {"name": "tests/shared", "source": {"hostPath": {"path": "/srv"}}}


class Jobs:
    """Every profiling Job that ever was in a namespace: finished ones are deleted soon."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._log = cluster.layout.audit
        self._namespace = namespace

    def created(self) -> list[str]:
        """Names, one for each creation that succeeded."""
        return audit.created(self._log, "jobs", self._namespace)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, namespace: str) -> Jobs:
    return Jobs(cluster, namespace)


@pytest.fixture(scope="module")
def services(make: Make) -> dict[str, Service]:
    return {
        "full": make("full", **on_gpu([H200], count=5), engine={"tensorParallelSize": 5}),
        "three": make("three", **on_gpu([H200, A100, L4])),
        "pool": make("pool"),
        "first": make("first", target=SHARED_TARGET, standin={"profile_s": 2}),
        "second": make("second", target=SHARED_TARGET, standin={"profile_s": 2}),
        "careful": make("careful", profiling={"mode": "Required"}, standin={"profile_s": 2}),
    }


@pytest.fixture(scope="module")
def crowded(services: dict[str, Service]) -> tuple[Service, set[str]]:
    """A rollout that has no room, and the pods that it is to replace.

    Begun early, since the verdict takes a minute, but after the Jobs on that product, which would have no room.
    """
    services["three"].wait("ProfilesReady", "True")
    service = services["full"]
    service.wait_updated()
    before = uids(service.ready_pods())
    service.patch({"engine": {"maxModelLen": 512}})
    return service, before


def test_three_products_get_three_jobs(services: dict[str, Service], jobs: Jobs, client: Client) -> None:
    """One latency profile for each product that the service names, measured on a node of that product."""
    service = services["three"]
    service.wait("ProfilesReady", "True", "Profiled")
    profiles = {p["product"]: p["configMap"] for p in service.read()["status"]["profiles"]}
    assert set(profiles) == {H200, A100, L4}
    assert len(set(profiles.values())) == 3
    for product, name in profiles.items():
        assert jobs.created().count(name) == 1
        profile = client.get(CONFIG_MAP, service.namespace, name)
        assert profile is not None
        assert json.loads(profile["data"][TARGET_FILE])["product"] == product


@pytest.mark.usefixtures("crowded")
def test_a_pod_learns_which_product_it_runs_on(services: dict[str, Service], cluster: Cluster) -> None:
    """The operator annotates it once it is scheduled; the downward API tells the runtime."""
    service = services["three"]
    service.wait_updated()
    pod = service.ready_pods()[0]
    node = cluster.get("node", pod["spec"]["nodeName"])
    product = node["metadata"]["labels"]["nvidia.com/gpu.product"]
    wait_for("the annotation", lambda: annotation(service.pods()[0], PRODUCT_ANNOTATION) == product)


def test_a_patched_in_draft_is_all_that_is_measured(services: dict[str, Service], jobs: Jobs) -> None:
    """A new drafter costs one drafter's measurement: the target's coefficients stay as they were."""
    service = services["pool"]
    service.wait("ProfilesReady", "True")
    before = _profile(service)
    service.patch({"draftPool": [LOOKUP, EAGLE]})
    wait_for("the second measurement", lambda: len(_profile(service)) == len(before) + 1)
    service.wait("ProfilesReady", "True")
    assert all(_profile(service)[key] == value for key, value in before.items())
    assert jobs.created().count(service.read()["status"]["profiles"][0]["configMap"]) == 2


def test_block_and_mtp_drafts_are_measured_by_a_job_each(services: dict[str, Service], jobs: Jobs) -> None:
    """MTP has no checkpoint of its own, and is measured like a drafter that has one."""
    service, pool = services["pool"], [LOOKUP, EAGLE]
    names = {"lookup", "eagle"}
    service.wait("ProfilesReady", "True")
    job = service.read()["status"]["profiles"][0]["configMap"]
    for drafter in (BLOCK, MTP):
        before, count = _profile(service), jobs.created().count(job)
        pool = [*pool, drafter]
        service.patch({"draftPool": pool})
        names = {*names, str(drafter["name"])}
        wait_for(f"{drafter['name']}'s profile", partial(_are_profiled, service, names))
        service.wait("ProfilesReady", "True")
        assert jobs.created().count(job) == count + 1
        assert {**_profile(service), **before} == _profile(service), "nothing else was measured again"


def test_the_annotation_measures_again(services: dict[str, Service], client: Client, jobs: Jobs) -> None:
    """outrider.dev/reprofile with a new value: every part is measured again, once."""
    service = services["pool"]
    service.wait("ProfilesReady", "True")
    name = service.read()["status"]["profiles"][0]["configMap"]
    count = jobs.created().count(name)
    annotations = {"metadata": {"annotations": {REPROFILE_ANNOTATION: "once"}}}
    client.patch(SERVICE, service.namespace, service.name, annotations)
    wait_for("one more Job", lambda: jobs.created().count(name) == count + 1)
    wait_for("the Job to go", lambda: client.get(JOB, service.namespace, name) is None)
    assert jobs.created().count(name) == count + 1


def test_a_broken_profile_is_measured_again(services: dict[str, Service], client: Client) -> None:
    """A date of 300 characters, and no JSON at all: no exception, and the service has its profile again."""
    service = services["pool"]
    service.wait("ProfilesReady", "True")
    name = service.read()["status"]["profiles"][0]["configMap"]
    whole = service.child(CONFIG_MAP, name)["data"][TARGET_FILE]
    for broken in (re.sub('"measuredAt": *"[^"]*"', f'"measuredAt": "{"9" * 300}"', whole), "{"):
        client.patch(CONFIG_MAP, service.namespace, name, {"data": {TARGET_FILE: broken}})
        wait_for("a new measurement", lambda: _is_profile(service.child(CONFIG_MAP, name)))
        service.wait("ProfilesReady", "True")


def test_two_services_share_a_profile(services: dict[str, Service], jobs: Jobs, client: Client) -> None:
    """One Job for both; the profile outlives the first of them and goes with the last."""
    first, second = services["first"], services["second"]
    for service in (first, second):
        service.wait("ProfilesReady", "True")
    names = {service.read()["status"]["profiles"][0]["configMap"] for service in (first, second)}
    assert len(names) == 1
    (name,) = names
    assert jobs.created().count(name) == 1
    wait_for("two owners", lambda: _owners(client, first.namespace, name) == uids([first.read(), second.read()]))
    client.delete(SERVICE, first.namespace, first.name)
    wait_for("one owner", lambda: _owners(client, first.namespace, name) == uids([second.read()]))
    second.wait("ProfilesReady", "True")
    client.delete(SERVICE, second.namespace, second.name)
    wait_for("the profile to go", lambda: client.get(CONFIG_MAP, first.namespace, name) is None)


def test_required_waits_for_its_profile(services: dict[str, Service]) -> None:
    """profiling.mode: Required: the first pod is made after the profile."""
    service = services["careful"]
    service.wait_updated()
    assert service.condition("ProfilesReady")["status"] == "True"
    profile = service.child(CONFIG_MAP, service.read()["status"]["profiles"][0]["configMap"])
    pod = service.ready_pods()[0]
    assert pod["metadata"]["creationTimestamp"] >= profile["metadata"]["creationTimestamp"]


def test_a_job_gives_way_to_a_serving_pod(services: dict[str, Service], make: Make, client: Client) -> None:
    """A serving pod that needs the Job's GPUs gets them; the Job waits, and says for what."""
    services["three"].wait("ProfilesReady", "True")
    three = {
        "engine": {"tensorParallelSize": 3},
        **on_gpu([L4], count=3),
    }  # two fit with a pod of one GPU
    small = make("small", standin={"profile": "hang"}, **three)
    small.wait_updated()
    wait_for("the Job to take its GPUs", lambda: _running_jobs(client, small))
    serving = uids(small.ready_pods())
    needs = make("needs", profiling={"mode": "Skip"}, **three)
    needs.wait_updated()
    wait_for("the Job's controller to see its pod go", lambda: not _running_jobs(client, small))
    assert uids(small.ready_pods()) == serving
    # The Job has no new pod at first, and then one that the scheduler has not looked at.
    small.wait("ProfilesReady", "False", "Learning", "Insufficient nvidia.com/gpu")


@pytest.mark.parametrize("hopeless", ["affinity", "claim"])
def test_a_pod_that_cannot_run_blocks_no_measurement(hopeless: str, make: Make) -> None:
    """A zone that is not there, or a claim that is misspelled: other services are measured, and begin to serve."""
    lost: dict[str, Any] = {"affinity": {"nodeAffinity": NOWHERE}}
    if hopeless == "claim":
        lost = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "mispelled"}}]}
    waits = make(f"lost-{hopeless}", profiling={"mode": "Skip"}, podTemplate=lost)
    wait_for("a pod without a node", lambda: _unschedulable(waits))
    measured = make(f"beside-{hopeless}", profiling={"mode": "Required"})
    measured.wait_updated()
    assert _unschedulable(waits)


def test_the_end_of_a_first_job_is_heard_without_a_regular_look(make: Make, operator_process: OperatorProcess) -> None:
    """No status names a missing profile: a service that needed it to serve waited for the next resync."""
    shared = {"name": "tests/heard", "source": {"hostPath": {"path": "/srv"}}}
    required = {"target": shared, "profiling": {"mode": "Required"}, "standin": {"profile_s": 2}}
    with operator_process.restarted(OUTRIDER_RESYNC_INTERVAL="1h"):
        for service in [make(name, **required) for name in ("heard", "overheard")]:
            service.wait_updated()


def test_a_service_that_leaves_a_measurement_does_not_stop_it(make: Make, client: Client) -> None:
    """Two services wait for one Job; one changes its target: the Job goes on for the other, and goes with that one."""
    target = {"name": "tests/left", "source": {"hostPath": {"path": "/srv"}}}
    stays, leaves = (make(name, target=target, standin={"profile": "hang"}) for name in ("stays", "leaves"))
    both = uids([stays.read(), leaves.read()])
    job = wait_for("a Job of both", lambda: _job_of(client, stays.namespace, both))
    leaves.patch({"target": {"name": "tests/another"}})
    wait_for("a Job of one", lambda: _job_of(client, stays.namespace, uids([stays.read()])) == job)
    stays.patch({"target": {"name": "tests/yet-another"}})
    wait_for("the Job to go", lambda: client.get(JOB, stays.namespace, job) is None)


def test_no_room_for_the_surge_pod(crowded: tuple[Service, set[str]]) -> None:
    """All GPUs are taken: NoCapacity after a minute, naming the remedy; the old pod serves on, and the remedy works."""
    service, before = crowded
    progressing = service.wait("Progressing", "False", "NoCapacity")
    assert "maxUnavailable: 1" in progressing["message"]
    assert uids(service.ready_pods()) == before
    assert service.condition("Ready")["status"] == "True"
    service.patch({"rollout": {"maxUnavailable": 1, "maxSurge": 0}})
    service.wait_updated()
    assert uids(service.ready_pods()).isdisjoint(before)


def _job_of(client: Client, namespace: str, owners: set[str]) -> str:
    """Name of the Job with exactly these owners; empty when there is none."""
    matches = [
        job["metadata"]["name"]
        for job in client.list(JOB, namespace)
        if {owner["uid"] for owner in job["metadata"]["ownerReferences"]} == owners
    ]
    return matches[0] if matches else ""


def _is_profile(config_map: dict[str, Any]) -> bool:
    try:
        TargetProfile.read(config_map["data"][TARGET_FILE])
    except ValidationError:
        return False
    return True


def _unschedulable(service: Service) -> bool:
    conditions = [entry for pod in service.pods() for entry in pod["status"].get("conditions", [])]
    return any(entry["type"] == "PodScheduled" and entry.get("reason") == "Unschedulable" for entry in conditions)


def _running_jobs(client: Client, service: Service) -> set[str]:
    """Uids of the service's Jobs whose pod runs."""
    uid = service.read()["metadata"]["uid"]
    jobs = client.list(JOB, service.namespace)
    own = [job for job in jobs if any(owner["uid"] == uid for owner in job["metadata"]["ownerReferences"])]
    return uids([job for job in own if job.get("status", {}).get("ready")])


def _profile(service: Service) -> dict[str, str]:
    name = service.read()["status"]["profiles"][0]["configMap"]
    data: dict[str, str] = service.child(CONFIG_MAP, name)["data"]
    return {key: value for key, value in data.items() if "failures" not in key}


def _are_profiled(service: Service, names: set[str]) -> bool:
    """Whether these are the drafters that the status calls profiled."""
    return {draft["name"] for draft in service.read()["status"]["drafts"] if draft.get("profiled")} == names


def _owners(client: Client, namespace: str, name: str) -> set[str]:
    profile = client.get(CONFIG_MAP, namespace, name)
    return {owner["uid"] for owner in (profile or {"metadata": {}})["metadata"].get("ownerReferences", [])}
