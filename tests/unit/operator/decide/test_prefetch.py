"""`modelCache.pvc` with models of a hub: one download, before any pod."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_crds.prefetch_report import PrefetchProgress
from outrider_operator.cluster_model import DEPLOYMENT, JOB, Object

from tests.unit.operator.decide.world import EAGLE, PLD, World, boot_of, gpu_node, manifest

CLAIM: dict[str, Any] = {"modelCache": {"pvc": {"claimName": "cache"}}}
NAME = "chat-prefetch"


def started(**spec: Any) -> World:
    return World(
        manifest(**{**CLAIM, "draftPool": [PLD, EAGLE], **spec}), nodes=(gpu_node("a", "NVIDIA-L4"),)
    ).settled()


def job(world: World) -> Object:
    return world.objects[JOB, NAME]


def download_pod(phase: str) -> Object:
    """The Job's pod."""
    metadata = {"name": f"{NAME}-x", "labels": {"batch.kubernetes.io/job-name": NAME}}
    return {"metadata": metadata, "status": {"phase": phase}}


def revision(world: World) -> str:
    return world.revision()


def test_models_are_downloaded_once_before_pods_and_jobs() -> None:
    """Eight pods and a Job downloaded 140 GB each."""
    world = started(replicas=8)
    assert not world.jobs(), "a profiling Job would download them as well"
    assert (DEPLOYMENT, "chat") not in world.objects
    (container,) = job(world)["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["outrider-prefetch"]
    assert container["args"] == ["--target", "org/target@", "--draft", "org/eagle@"]
    assert world.reason(C.PROGRESSING) == "True/WaitingForModels"
    assert world.reason(C.UPDATED) == "False/WaitingForModels"
    world.finish_job(NAME, "")
    world.serve()
    assert world.reason(C.UPDATED) == "True/UpToDate"
    assert world.objects[JOB, NAME], "it stays, as the record of what is on the claim"


def test_progress_is_in_status_and_condition() -> None:
    world = started()
    world.job_pods[NAME] = download_pod("Running")
    world.prefetch_progress = PrefetchProgress(model="org/target", downloaded_bytes=3 << 30, total_bytes=12 << 30)
    world.settle()
    assert "org/target, org/eagle into claim cache" in world.condition(C.PROGRESSING).message
    assert "3Gi of 12Gi (25%)" in world.condition(C.PROGRESSING).message
    status = world.observed().status.prefetch
    assert status is not None
    assert (status.phase, status.downloaded, status.total) == ("Downloading", "3Gi", "12Gi")


def test_download_takes_no_gpu_and_no_product() -> None:
    """A GPU would stand idle while the network works."""
    world = started(accelerator={"products": ["NVIDIA-L4"], "tolerations": [{"key": "gpu", "operator": "Exists"}]})
    pod = job(world)["spec"]["template"]["spec"]
    assert not pod["containers"][0]["resources"]
    assert "affinity" not in pod
    assert {"key": "gpu", "operator": "Exists"} in pod["tolerations"]


def test_download_runs_where_serving_pods_may_run() -> None:
    """A claim that waits for its first pod was bound in a zone in which no serving pod may run."""
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["b"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    world = started(
        accelerator={"products": ["NVIDIA-L4"], "nodeSelector": {"pool": "inference"}},
        podTemplate={"affinity": affinity, "nodeSelector": {"disk": "fast"}},
    )
    pod = job(world)["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "inference", "disk": "fast"}
    assert pod["affinity"] == affinity, "the product is no condition: its nodes may be full"


@pytest.mark.parametrize(("product", "is_tolerated"), [("NVIDIA-L4", True), ("cpu", False)])
def test_download_tolerates_the_taint_of_gpu_nodes(product: str, is_tolerated: bool) -> None:
    """Admission lets serving pods onto such nodes, by their GPUs; the node selector may leave no others."""
    world = started(accelerator={"products": [product], "nodeSelector": {"pool": "inference"}})
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    pod = job(world)["spec"]["template"]["spec"]
    assert (taint in pod.get("tolerations", [])) is is_tolerated


def test_download_requests_cpu_and_memory_without_devices() -> None:
    """A ResourceQuota refuses a pod that has no requests."""
    amounts = {"cpu": "2", "memory": "8Gi"}
    resources = {"requests": amounts, "limits": amounts, "claims": [{"name": "gpu"}]}
    world = started(
        accelerator={"products": ["NVIDIA-L4"]},
        podTemplate={"resources": resources, "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]},
    )
    pod = job(world)["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"requests": amounts, "limits": amounts}
    assert "resourceClaims" not in pod


@pytest.mark.parametrize(("phase", "is_made_again"), [("Pending", True), ("Running", False)])
def test_changed_settings_reach_a_download_that_waits(phase: str, is_made_again: bool) -> None:
    """A node selector that no node has kept the Job's pod waiting for ever, whatever the spec said later."""
    world = started()
    uid = job(world)["metadata"]["uid"]
    world.job_pods[NAME] = download_pod(phase)
    world.change(podTemplate={"nodeSelector": {"disk": "fast"}})
    assert (job(world)["metadata"]["uid"] != uid) is is_made_again


def test_new_draft_is_downloaded_while_the_old_pods_serve() -> None:
    world = World(manifest(**CLAIM)).settled()
    world.finish_job(NAME, "")
    world.serve()
    before = revision(world)
    world.change(draftPool=[PLD, EAGLE])
    assert revision(world) == before
    assert world.reason(C.READY) == "True/EndpointReady"
    assert "The old pods serve on" in world.condition(C.PROGRESSING).message
    world.finish_job(NAME, "")
    world.settle()
    assert revision(world) != before


def test_other_change_downloads_nothing() -> None:
    """The Job of before says what is on the claim."""
    world = World(manifest(**CLAIM)).settled()
    world.finish_job(NAME, "")
    world.serve()
    uid = job(world)["metadata"]["uid"]
    world.change(engine={"maxModelLen": 1024})
    assert job(world)["metadata"]["uid"] == uid
    assert boot_of(world.objects["ConfigMap", f"chat-{revision(world)}"])["engine"]["maxModelLen"] == 1024


def test_failed_download_is_repeated_once_the_spec_is_mended() -> None:
    """A gated model without its token."""
    world = started()
    world.finish_job(NAME, "outrider-prefetch: model 'org/target' cannot be had: 401", exit_code=1, reason="Error")
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert world.reason(C.STALLED) == "True/Stalled"
    message = world.condition(C.PROGRESSING).message
    assert "org/target" in message
    assert "401" in message
    assert f"delete Job {NAME} to try now" in message
    uid = job(world)["metadata"]["uid"]
    world.change(target={"name": "org/target", "source": {"hub": {"tokenSecretRef": {"name": "hub"}}}})
    assert job(world)["metadata"]["uid"] != uid
    assert world.reason(C.PROGRESSING) == "True/WaitingForModels"


@pytest.mark.parametrize("has_sidecar", [False, True])
def test_refused_download_is_tried_again_after_an_hour(has_sidecar: bool) -> None:
    """Bug: after a token was replaced in its Secret, which the operator may not read, the Job had to be deleted."""
    world = started()
    world.finish_job(NAME, "outrider-prefetch: model 'org/target' cannot be had: 401", exit_code=69, reason="Error")
    if has_sidecar:
        world.join_sidecar(NAME)
    uid, ended_s = job(world)["metadata"]["uid"], world.now
    world.now = ended_s + 3599
    world.settle()
    assert job(world)["metadata"]["uid"] == uid
    assert phase(world) == "Failed"
    world.now = ended_s + 3600
    world.settle()
    assert job(world)["metadata"]["uid"] != uid
    assert world.reason(C.PROGRESSING) == "True/WaitingForModels"


def test_paused_service_keeps_the_reason_of_a_failed_download() -> None:
    """Bug: an hour later its Job was deleted, and none was made."""
    world = started()
    world.finish_job(NAME, "outrider-prefetch: model 'org/target' cannot be had: 401", exit_code=69, reason="Error")
    uid = job(world)["metadata"]["uid"]
    world.change(paused=True)
    world.now += 3600
    world.settle()
    assert job(world)["metadata"]["uid"] == uid
    assert phase(world) == "Failed"
    world.change(paused=False)
    assert job(world)["metadata"]["uid"] != uid


@pytest.mark.parametrize(
    ("words", "is_rolled_out"),
    [
        ('exec: "outrider-prefetch": executable file not found in $PATH', True),
        ("failed to create shim task: context deadline exceeded", False),
    ],
)
def test_image_without_the_program_lets_pods_download(words: str, is_rolled_out: bool) -> None:
    """A service must not wait for ever for what its image lacks, nor roll out after any container that was not made."""
    world = started()
    world.finish_job(NAME, words, exit_code=128, reason="StartError")
    world.settle()
    assert ((DEPLOYMENT, "chat") in world.objects) is is_rolled_out


def test_download_with_a_sidecar_is_complete_and_goes() -> None:
    """An ordinary sidecar kept the Job active, so that no Deployment ever came in a mesh namespace."""
    world = started()
    world.finish_job(NAME, "")
    world.join_sidecar(NAME)
    world.reconcile()
    assert phase(world) == "Complete"
    world.serve()
    assert world.reason(C.UPDATED) == "True/UpToDate"
    assert (JOB, NAME) not in world.objects, "its pod held memory for nothing"


def test_download_that_ends_leaves_its_job_as_the_record() -> None:
    """The kubelet reports the container's end a moment before the pod's: the Job was taken for one with a sidecar."""
    world = started()
    world.finish_job(NAME, "")
    job(world).pop("status")
    world.job_pods[NAME]["status"]["phase"] = "Running"
    world.settle()
    world.replace_pods()
    assert phase(world) == "Complete"


def test_download_counts_although_a_sidecar_failed_its_pod() -> None:
    """The Job downloads again, and failed in the end; so did the service."""
    world = started()
    world.finish_job(NAME, "")
    world.job_pods[NAME]["status"]["phase"] = "Failed"
    job(world)["status"]["conditions"][0]["type"] = "Failed"
    world.reconcile()
    assert phase(world) == "Complete"
    world.serve()
    assert (JOB, NAME) not in world.objects, "its pods, which tell so, may go at any time"


def test_download_that_fails_with_a_sidecar_says_why() -> None:
    world = started()
    world.finish_job(NAME, "outrider-prefetch: model 'org/target' cannot be had: 404", exit_code=69, reason="Error")
    world.join_sidecar(NAME)
    world.reconcile()
    assert phase(world) == "Failed"
    assert "404" in world.condition(C.PROGRESSING).message


def test_download_whose_init_container_fails_says_why() -> None:
    """The words were "Job has reached the specified backoff limit"."""
    world = started()
    world.finish_job(NAME, "", exit_code=1)
    status = world.job_pods[NAME]["status"]
    ended = {"exitCode": 3, "reason": "Error", "message": "vault: permission denied"}
    status |= {"containerStatuses": [], "initContainerStatuses": [{"name": "vault", "state": {"terminated": ended}}]}
    world.settle()
    assert "init container vault: exit code 3 (Error); its last lines: vault: permission denied" in (
        world.condition(C.PROGRESSING).message
    )


def test_download_that_is_held_up_says_by_what() -> None:
    """A hub that answered 503 was "Downloading 3.0 GB of 16.0 GB" for ever."""
    world = started()
    world.job_pods[NAME] = download_pod("Running")
    world.prefetch_progress = PrefetchProgress(model="org/target", trouble="503 Service Unavailable")
    world.settle()
    assert "is held up: 503 Service Unavailable." in world.condition(C.PROGRESSING).message


@pytest.mark.parametrize(
    ("exit_code", "reason", "is_rolled_out"),
    [(127, "PodFailurePolicy", True), (1, "PodFailurePolicy", False), (127, "BackoffLimitExceeded", False)],
)
def test_missing_program_is_known_without_the_pod(exit_code: int, reason: str, is_rolled_out: bool) -> None:
    """The pod of the Job was collected, and the next revision was Stalled."""
    world = started()
    world.finish_job(NAME, "", exit_code=exit_code, reason="Error")
    del world.job_pods[NAME]
    (failed,) = job(world)["status"]["conditions"]
    words = f"Container prefetch for pod default/x failed with exit code {exit_code} matching FailJob rule at index 0"
    failed.update(reason=reason, message=words)
    world.settle()
    assert ((DEPLOYMENT, "chat") in world.objects) is is_rolled_out


def phase(world: World) -> str:
    status = world.observed().status.prefetch
    return status.phase if status is not None else ""


def test_paused_service_downloads_nothing() -> None:
    """The status said Downloading."""
    assert phase(started(paused=True)) == "Waiting"


def test_job_of_other_models_is_not_the_download() -> None:
    """The status said Downloading while the Job of the last revision was there."""
    world = World(manifest(**CLAIM)).settled()
    world.finish_job(NAME, "")
    world.serve()
    assert phase(world) == "Complete"
    world.patch(draftPool=[PLD, EAGLE], paused=True)
    world.reconcile()
    assert phase(world) == "Waiting"


def test_job_without_a_pod_says_why() -> None:
    """A quota on pods: Progressing said that models were being downloaded."""
    world = started()
    world.warnings[NAME] = "FailedCreate: exceeded quota: pods"
    world.settle()
    assert phase(world) == "Waiting"
    message = world.condition(C.PROGRESSING).message
    assert "org/target, org/eagle into claim cache has not begun. FailedCreate: exceeded quota: pods." in message
    del world.warnings[NAME]
    world.job_pods[NAME] = download_pod("Running")
    world.settle()
    assert phase(world) == "Downloading"
    assert "Downloading org/target" in world.condition(C.PROGRESSING).message


def test_refused_job_is_named_in_progressing() -> None:
    world = World(manifest(**CLAIM))
    world.refuse(lambda document: document["metadata"]["name"] == NAME, "exceeded quota: jobs")
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert "exceeded quota: jobs" in world.condition(C.PROGRESSING).message
    assert phase(world) == "Waiting", "the status said Downloading"
    assert world.reason(C.SPEC_VALID) == "True/Accepted"


def test_emptydir_and_mounted_models_need_no_download() -> None:
    cases: list[dict[str, Any]] = [
        {"modelCache": {"emptyDir": {}}},
        {"target": {"name": "m", "source": {"s3": {"uri": "s3://models/m"}}}},
    ]
    for spec in cases:
        world = World(manifest(**{**CLAIM, **spec})).settled()
        assert (JOB, NAME) not in world.objects
        assert (DEPLOYMENT, "chat") in world.objects
