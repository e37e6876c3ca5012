"""`modelCache.pvc` with models of a hub: one download, before any pod."""

from __future__ import annotations

from typing import Any

from outrider_crds.prefetch import PrefetchProgress
from outrider_crds.status import ConditionType as C
from outrider_operator.cluster_model import DEPLOYMENT, JOB, Object

from tests.unit.operator.decide.world import EAGLE, PLD, World, boot_of, gpu_node, manifest

CLAIM: dict[str, Any] = {"modelCache": {"pvc": {"claimName": "cache"}}}
NAME = "chat-prefetch"


def world(**spec: Any) -> World:
    made = World(manifest(**{**CLAIM, "draftPool": [PLD, EAGLE], **spec}), nodes=(gpu_node("a", "NVIDIA-L4"),))
    made.settle()
    return made


def job(found: World) -> Object:
    return found.objects[JOB, NAME]


def revision(found: World) -> str:
    return found.revision()


def test_models_are_downloaded_once_before_pods_and_jobs() -> None:
    """Eight pods and a Job downloaded 140 GB each."""
    found = world(replicas=8)
    assert not found.jobs(), "a profiling Job would download them as well"
    assert (DEPLOYMENT, "chat") not in found.objects
    (container,) = job(found)["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["outrider-prefetch"]
    assert container["args"] == ["--target", "org/target@", "--draft", "org/eagle@"]
    assert found.reason(C.PROGRESSING) == "True/WaitingForModels"
    assert found.reason(C.UPDATED) == "False/WaitingForModels"
    found.finish_job(NAME, "")
    found.serve()
    assert found.reason(C.UPDATED) == "True/UpToDate"
    assert found.objects[JOB, NAME], "it stays, as the record of what is on the claim"


def test_progress_is_in_status_and_condition() -> None:
    found = world()
    found.prefetch_progress = PrefetchProgress(model="org/target", downloaded_bytes=3 << 30, total_bytes=12 << 30)
    found.settle()
    assert "org/target, org/eagle into claim cache" in found.condition(C.PROGRESSING).message
    assert "3Gi of 12Gi (25%)" in found.condition(C.PROGRESSING).message
    status = found.observed().status.prefetch
    assert status is not None
    assert (status.phase, status.downloaded, status.total) == ("Downloading", "3Gi", "12Gi")


def test_download_takes_no_gpu_and_no_product() -> None:
    """A GPU would stand idle while the network works."""
    found = world(accelerator={"products": ["NVIDIA-L4"], "tolerations": [{"key": "gpu", "operator": "Exists"}]})
    pod = job(found)["spec"]["template"]["spec"]
    assert "resources" not in pod["containers"][0]
    assert "affinity" not in pod
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]


def test_new_draft_is_downloaded_while_the_old_pods_serve() -> None:
    found = World(manifest(**CLAIM))
    found.settle()
    found.finish_job(NAME, "")
    found.serve()
    before = revision(found)
    found.patch(draftPool=[PLD, EAGLE])
    found.settle()
    assert revision(found) == before
    assert found.reason(C.READY) == "True/EndpointReady"
    assert "The old pods serve on" in found.condition(C.PROGRESSING).message
    found.finish_job(NAME, "")
    found.settle()
    assert revision(found) != before


def test_other_change_downloads_nothing() -> None:
    """The Job of before says what is on the claim."""
    found = World(manifest(**CLAIM))
    found.settle()
    found.finish_job(NAME, "")
    found.serve()
    uid = job(found)["metadata"]["uid"]
    found.patch(engine={"maxModelLen": 1024})
    found.settle()
    assert job(found)["metadata"]["uid"] == uid
    assert boot_of(found.objects["ConfigMap", f"chat-{revision(found)}"])["engine"]["maxModelLen"] == 1024


def test_failed_download_is_told_and_tried_again_once_the_spec_is_mended() -> None:
    """A gated model without its token."""
    found = world()
    found.finish_job(NAME, "outrider-prefetch: model 'org/target' cannot be had: 401", exit_code=1, reason="Error")
    found.settle()
    assert found.reason(C.PROGRESSING) == "False/Stalled"
    assert found.reason(C.STALLED) == "True/Stalled"
    message = found.condition(C.PROGRESSING).message
    assert "org/target" in message
    assert "401" in message
    assert f"delete Job {NAME} to try again" in message
    uid = job(found)["metadata"]["uid"]
    found.patch(target={"name": "org/target", "source": {"hub": {"tokenSecretRef": {"name": "hub"}}}})
    found.settle()
    assert job(found)["metadata"]["uid"] != uid
    assert found.reason(C.PROGRESSING) == "True/WaitingForModels"


def test_image_of_an_earlier_release_lets_pods_download() -> None:
    """It has no such program: the service must not wait for ever."""
    found = world()
    found.finish_job(NAME, "exec: outrider-prefetch: not found", exit_code=128, reason="StartError")
    found.settle()
    assert (DEPLOYMENT, "chat") in found.objects


def test_refused_job_is_named_in_progressing() -> None:
    found = World(manifest(**CLAIM))
    found.refuse(lambda document: document["metadata"]["name"] == NAME, "exceeded quota: jobs")
    found.settle()
    assert found.reason(C.PROGRESSING) == "False/Stalled"
    assert "exceeded quota: jobs" in found.condition(C.PROGRESSING).message
    assert found.reason(C.SPEC_VALID) == "True/Accepted"


def test_emptydir_and_mounted_models_need_no_download() -> None:
    cases: list[dict[str, Any]] = [
        {"modelCache": {"emptyDir": {}}},
        {"target": {"name": "m", "source": {"s3": {"uri": "s3://models/m"}}}},
    ]
    for spec in cases:
        found = World(manifest(**{**CLAIM, **spec}))
        found.settle()
        assert (JOB, NAME) not in found.objects
        assert (DEPLOYMENT, "chat") in found.objects
