"""Available, Updated, Progressing, Ready: what they say, row by row, and never more than they may."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from outrider_crds.conditions import ConditionType as C
from outrider_operator.cluster_model import DEPLOYMENT, KUBERNETES_SERVICE, Object
from outrider_operator.decide.pods.pod_states import LOOK_AGAIN_S
from outrider_operator.figure_windows import FigureWindows

from tests.unit.operator.decide.world import World, manifest, rfc3339, unschedulable


def rolling(**spec: Any) -> World:
    """A service that serves with one revision while the next begins: the new template is applied, no pod yet."""
    world = World(manifest(**spec)).served()
    world.change(engine={"maxModelLen": 512})
    deployment = world.deployment()
    deployment["status"] |= {"observedGeneration": deployment["metadata"]["generation"], "updatedReplicas": 0}
    deployment["status"]["conditions"] = [{"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}]
    return world


def new_pod(world: World, **container: Any) -> Object:
    pod = world.add_pod("new", world.deployment()["spec"]["template"], ready=False)
    pod["status"]["phase"] = "Pending"
    pod["status"]["containerStatuses"] = [{"name": "runtime", "image": "i:1", "restartCount": 0, **container}]
    return pod


def test_a_rollout_is_reported_while_old_pods_serve() -> None:
    """Progressing while pods are replaced; Ready and Available stay."""
    world = rolling()
    new_pod(world, state={"waiting": {"reason": "ContainerCreating"}})
    world.settle()
    assert world.reason(C.PROGRESSING) == "True/RollingOut"
    assert world.reason(C.UPDATED) == "False/RollingOut"
    assert world.reason(C.AVAILABLE) == "True/EnoughReadyPods"
    assert world.reason(C.READY) == "True/EndpointReady"


def test_missing_room_for_surge_names_max_unavailable_after_60_s() -> None:
    """NoCapacity only after 60 s, woken by the operator's own clock; the sentence says what to do."""
    world = rolling(profiling={"mode": "Skip"})
    unschedulable(world, "new", world.now)
    plan = world.settle()
    assert world.reason(C.PROGRESSING) == "True/RollingOut"
    assert plan.requeue_after_s == pytest.approx(LOOK_AGAIN_S), "its events may say that a node is being made"
    world.now += 60
    world.settle()
    progressing = world.condition(C.PROGRESSING)
    assert (progressing.status, progressing.reason) == ("False", "NoCapacity")
    assert "maxUnavailable: 1" in progressing.message
    assert "insufficient nvidia.com/gpu" in progressing.message
    assert world.reason(C.READY) == "True/EndpointReady"


@pytest.mark.parametrize("evidence", ["event", "taint"])
def test_node_that_is_being_made_is_progress_until_the_deadline(evidence: str) -> None:
    """Every scale-up of nodes was NoCapacity and a Warning, for the two to ten minutes that a node takes."""
    world = rolling(profiling={"mode": "Skip"})
    pod = unschedulable(world, "new", world.now)
    if evidence == "event":
        world.provisioning = {"new": "TriggeredScaleUp: pod triggered scale-up: [{gpu-pool 2->3 (max: 8)}]"}
    else:
        said = "0/3 nodes are available: 1 node(s) had untolerated taint(s) {karpenter.sh/unregistered: }."
        pod["status"]["conditions"][0]["message"] = said
    world.now += 600
    plan = world.settle()
    progress = world.condition(C.PROGRESSING)
    assert (progress.status, progress.reason) == ("True", "RollingOut")
    assert "waits for a node that is being made" in progress.message
    assert ("gpu-pool 2->3" if evidence == "event" else "karpenter.sh/unregistered") in progress.message
    assert plan.requeue_after_s == pytest.approx(LOOK_AGAIN_S)
    deployment = world.deployment()
    deployment["status"]["conditions"] = [
        {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    ]
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/NoCapacity"


def test_no_room_for_the_first_pod_does_not_speak_of_old_ones() -> None:
    """maxUnavailable would not help where nothing serves yet."""
    world = World(manifest()).settled()
    unschedulable(world, "first", world.now - 61)
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/NoCapacity"
    assert "maxUnavailable" not in world.condition(C.PROGRESSING).message


def test_unpullable_image_is_named_while_old_pods_serve() -> None:
    """The condition says so at once, not only at the deadline."""
    world = rolling()
    new_pod(world, state={"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})
    world.settle()
    progressing = world.condition(C.PROGRESSING)
    assert (progressing.status, progressing.reason) == ("False", "Stalled")
    assert "cannot pull i:1" in progressing.message
    assert "Check podTemplate.image and" in progressing.message
    assert "old pods serve on" in progressing.message
    assert world.reason(C.READY) == "True/EndpointReady"


def test_image_of_a_model_is_named_when_it_cannot_be_pulled() -> None:
    """The kubelet reports it as the container's own; the sentence blamed the runtime image."""
    world = World(manifest()).served()
    world.change(target={"name": "llama", "source": {"oci": {"reference": "registry/models/llama:1"}}})
    pod = world.add_pod("new", world.deployment()["spec"]["template"], ready=False)
    said = 'Back-off pulling image "registry/models/llama:1": ErrImagePull: failed to pull and unpack image'
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": said}}
    pod["status"]["containerStatuses"] = [{"name": "runtime", "image": "outrider/runtime:1", "state": waiting}]
    world.settle()
    message = world.condition(C.PROGRESSING).message
    assert "cannot pull registry/models/llama:1" in message
    assert "Check source.oci of the models" in message


def test_node_that_mounts_no_images_is_pod_cannot_start() -> None:
    """containerd 1.6 takes an image volume for a folder without a name. As seen with it."""
    world = World(
        manifest(target={"name": "llama", "source": {"oci": {"reference": "registry/models/llama:1"}}})
    ).settled()
    pod = world.add_pod("new", world.deployment()["spec"]["template"], ready=False)
    said = 'failed to generate container spec: failed to apply OCI options: failed to mkdir "": mkdir : no such file'
    waiting = {"waiting": {"reason": "CreateContainerError", "message": said}}
    pod["status"]["containerStatuses"] = [{"name": "runtime", "image": "outrider/runtime:1", "state": waiting}]
    world.settle()
    assert world.reason(C.READY) == "False/PodCannotStart"
    assert "The node's container runtime mounts no images (source.oci)" in world.condition(C.READY).message


def test_a_crashing_pod_says_its_last_lines() -> None:
    """The message has the pod's last lines, without a right to read logs, and no count that changes at every crash."""
    world = rolling()
    ended = {"exitCode": 1, "reason": "Error", "message": "loading\nModelNotFound: /models/x"}
    waiting = {"reason": "CrashLoopBackOff"}
    pod = new_pod(world, restartCount=3, state={"waiting": waiting}, lastState={"terminated": ended})
    world.settle()
    progressing = world.condition(C.PROGRESSING)
    assert (progressing.status, progressing.reason) == ("False", "Stalled")
    assert "ModelNotFound: /models/x" in progressing.message
    pod["status"]["containerStatuses"][0]["restartCount"] = 4
    world.settle()
    assert world.condition(C.PROGRESSING).message == progressing.message


def test_restarts_of_last_month_are_no_crash_today() -> None:
    """A pod that failed one probe "kept ending with exit code 1", by restarts that it had recovered from."""
    world = World(manifest()).served()
    (pod,) = world.pods.values()
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": rfc3339(world.now - 30 * 86400)}
    status = {"restartCount": 2, "started": True, "lastState": {"terminated": ended}}
    pod["status"]["containerStatuses"][0] |= status
    world.settle()
    assert world.reason(C.AVAILABLE) == "False/TooFewReadyPods"
    ended |= {"startedAt": rfc3339(world.now - 90), "finishedAt": rfc3339(world.now - 60)}
    world.settle()
    assert world.reason(C.AVAILABLE) == "False/PodCrashing"


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "CreateContainerError"])
def test_a_container_that_cannot_be_made_cannot_start(reason: str) -> None:
    """An absent Secret in env was PodCrashing, whose remedy speaks of last lines; no container ever ran."""
    world = World(manifest()).settled()
    new_pod(world, state={"waiting": {"reason": reason, "message": 'secret "token" not found'}})
    world.settle()
    assert world.reason(C.READY) == "False/PodCannotStart"
    assert 'secret "token" not found' in world.condition(C.READY).message


def _end(world: World, name: str, created: float, ended: float) -> None:
    """Adds a pod that the kubelet evicted."""
    pod = world.add_pod(name, world.deployment()["spec"]["template"], ready=False)
    pod["metadata"]["creationTimestamp"] = rfc3339(created)
    gone = {"type": "Ready", "status": "False", "lastTransitionTime": rfc3339(ended)}
    words = {"reason": "Evicted", "message": 'Usage of EmptyDir volume "model-cache" exceeds the limit "1Ki". '}
    pod["status"] = {"phase": "Failed", "conditions": [gone], **words}


def test_repeated_evictions_show_in_every_condition() -> None:
    """19 dead pods in 20 minutes, and no condition or event of the service said why."""
    world = rolling()
    world.reconcile()
    _end(world, "first", world.now - 120, world.now - 60)
    new_pod(world, state={"waiting": {"reason": "ContainerCreating"}})
    world.settle()
    assert world.reason(C.PROGRESSING) == "True/RollingOut", "one is replaced"
    assert "exceeds the limit" in world.condition(C.PROGRESSING).message
    _end(world, "second", world.now - 60, world.now - 5)
    plan = world.reconcile()
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert "ProgressingStalled" in [event.reason for event in plan.events]
    for pod in world.pods.values():
        pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.reconcile()
    for kind in (C.AVAILABLE, C.READY):
        assert world.reason(kind) == "False/PodEnded"
        assert 'exceeds the limit "1Ki"' in world.condition(kind).message
    world.now += 3600
    world.reconcile()
    assert world.reason(C.READY) == "False/NoReadyEndpoint"


def test_two_pods_of_a_node_that_shut_down_are_no_row() -> None:
    """Their replacements load, and nothing says that they will end as well."""
    world = rolling()
    world.reconcile()
    for name in ("first", "second"):
        _end(world, name, world.now - 9000, world.now - 5)
    world.settle()
    assert world.reason(C.PROGRESSING) == "True/RollingOut"


def test_first_pods_trouble_is_the_reason_of_ready_and_available() -> None:
    """Ready and Available have the cause if no pod serves."""
    world = World(manifest()).settled()
    new_pod(world, state={"waiting": {"reason": "ErrImagePull", "message": "no such host"}})
    world.settle()
    assert world.reason(C.READY) == "False/ImagePullFailed"
    assert world.reason(C.AVAILABLE) == "False/ImagePullFailed"
    world.pods["new"]["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    world.settle()
    assert world.reason(C.READY) == "False/PodCrashing"


def test_missing_model_folder_is_reported_in_the_kubelets_words() -> None:
    """A volume that cannot be mounted shows in the pod's events only; it is trouble once it lasts."""
    world = World(manifest()).settled()
    new_pod(world, state={"waiting": {"reason": "ContainerCreating"}})
    world.warnings = {"new": "FailedMount: hostPath type check failed: /models/x is not a directory"}
    plan = world.settle()
    assert world.reason(C.READY) == "False/NoReadyEndpoint"
    assert plan.requeue_after_s is not None, "no watch event tells of it"
    world.now += 30
    world.settle()
    assert world.reason(C.READY) == "False/PodCannotStart"
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert "/models/x is not a directory" in world.condition(C.PROGRESSING).message


def test_forbidden_pods_are_reported_in_the_api_servers_words() -> None:
    """There is no pod to look at: the Deployment alone knows."""
    world = World(manifest()).settled()
    message = 'pods "chat-1" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes'
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    world.deployment()["status"] = {"conditions": [failure]}
    world.settle()
    assert world.reason(C.READY) == "False/PodCannotStart"
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    said = world.condition(C.PROGRESSING).message
    assert "PodSecurity" in said
    failure["message"] = message.replace("chat-1", "chat-2")
    world.settle()
    assert world.condition(C.PROGRESSING).message == said


def test_a_rollout_past_its_deadline_is_stalled() -> None:
    """progressDeadline, as the Deployment reports it."""
    world = rolling()
    new_pod(world, state={"running": {}})
    world.deployment()["status"]["conditions"][0] |= {"status": "False", "reason": "ProgressDeadlineExceeded"}
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert "progressDeadline" in world.condition(C.PROGRESSING).message


def test_paused_stops_the_deployment_and_says_so() -> None:
    """The Deployment itself is paused: no controller rolls on behind our back."""
    world = rolling()
    world.change(paused=True)
    assert world.deployment()["spec"]["paused"] is True
    assert world.reason(C.PROGRESSING) == "False/Paused"
    assert world.reason(C.UPDATED) == "False/Paused"


def test_zero_replicas_are_legal() -> None:
    """Ready says ScaledToZero; everything is up to date."""
    world = World(manifest(replicas=0)).settled()
    assert world.deployment()["spec"]["replicas"] == 0
    world.replace_pods()
    assert world.reason(C.READY) == "False/ScaledToZero"
    assert world.reason(C.AVAILABLE) == "True/ScaledToZero"
    assert world.reason(C.UPDATED) == "True/UpToDate"
    assert world.reason(C.PROGRESSING) == "False/Complete"
    assert len(world.created_jobs) == 1, "nothing serves: the hardware is free to be measured"


def test_first_pod_that_was_never_ready_is_a_stuck_rollout() -> None:
    """Made with no pods, then scaled to one whose image is not there: Progressing said Complete."""
    world = World(manifest(replicas=0)).settled()
    world.replace_pods()
    world.patch(replicas=1)
    world.reconcile()
    world.replace_pods(ready=False)  # the Deployment's controller is faster than the operator's next look
    assert world.reason(C.PROGRESSING) == "True/RollingOut"
    (pod,) = world.pods.values()
    pod["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no such"}}
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert world.reason(C.UPDATED) == "False/RollingOut"


def test_pods_that_no_service_leads_to_are_not_ready() -> None:
    """A quota of no Services, from birth: Ready said EndpointReady, and there was no endpoint."""
    world = World(manifest())
    world.refuse(lambda document: document["kind"] == KUBERNETES_SERVICE, "exceeded quota: services=0")
    world.settle()
    world.replace_pods()
    assert world.reason(C.AVAILABLE) == "True/EnoughReadyPods"
    assert world.reason(C.READY) == "False/NoReadyEndpoint"
    assert "no Service" in world.condition(C.READY).message
    world.accept()
    world.settle()
    assert world.reason(C.READY) == "True/EndpointReady"


def test_a_pod_that_crashes_later_is_no_rollout() -> None:
    """Complete stays Complete; Available tells of the loss, Ready of the rest."""
    world = World(manifest(replicas=2)).served()
    pod = next(iter(world.pods.values()))
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.deployment()["status"]["availableReplicas"] = 1
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Complete"
    assert world.reason(C.AVAILABLE) == "False/TooFewReadyPods"
    assert world.reason(C.READY) == "True/EndpointReady"


def test_the_deployments_replicas_follow_the_service_only() -> None:
    """The scale subresource writes spec.replicas; a hand on the Deployment is undone."""
    world = World(manifest(replicas=2)).served()
    world.deployment()["spec"]["replicas"] = 7
    world.settle()
    assert world.deployment()["spec"]["replicas"] == 2


@pytest.mark.parametrize("field", ["replicas", "paused", "progressDeadlineSeconds"])
def test_fields_that_outrider_sets_come_back_and_others_stay(field: str) -> None:
    """Server-side apply by one manager."""
    world = World(manifest()).served()
    right = world.deployment()["spec"][field]
    world.deployment()["spec"][field] = 99
    world.deployment()["metadata"]["annotations"]["team"] = "a"
    world.reconcile()
    assert world.deployment()["spec"][field] == right
    assert not world.reconcile().apply


def test_what_the_api_server_defaults_is_no_difference() -> None:
    """Quantities in another spelling, defaulted fields, a sidecar's volume: nothing to apply."""
    world = World(manifest(podTemplate={"resources": {"limits": {"cpu": "1000m", "memory": "2048Mi"}}})).served()
    pod = world.deployment()["spec"]["template"]["spec"]
    pod["containers"][0]["resources"]["limits"] = {"cpu": "1", "memory": "2Gi"}
    pod["dnsPolicy"] = "ClusterFirst"
    pod["volumes"].insert(0, {"name": "more", "emptyDir": {}})
    del world.deployment()["spec"]["paused"]
    assert not world.reconcile().apply


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "ServiceAccount", "Deployment"])
def test_a_deleted_child_comes_back(kind: str) -> None:
    """Children deleted by hand."""
    world = World(manifest()).served()
    before = copy.deepcopy(world.objects[kind, "chat"])
    del world.objects[kind, "chat"]
    world.settle()
    assert world.objects[kind, "chat"].get("spec") == before.get("spec")


def test_updated_waits_for_the_deployment_controller() -> None:
    """The status of the generation before says nothing about the new template."""
    world = World(manifest()).served()
    world.change(engine={"maxModelLen": 512})
    assert world.objects[DEPLOYMENT, "chat"]["status"]["updatedReplicas"] == 1
    assert world.reason(C.UPDATED) == "False/RollingOut"
    assert world.reason(C.PROGRESSING) == "True/RollingOut"


def test_revert_to_a_retained_replica_set_waits_for_its_pods() -> None:
    """The Deployment's own word (NewReplicaSetAvailable) is of the rollout before: its pods crash, and say so."""
    world = World(manifest()).served()
    first = world.observed().service["spec"]
    world.change(engine={"maxModelLen": 512})
    world.roll_out()
    world.report_states()
    world.settle()  # the gate opens
    world.replace_pods()
    assert world.reason(C.PROGRESSING) == "False/Complete"
    world.change(engine=first.get("engine", {}))
    world.roll_out(ready=False)
    settled = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
    world.deployment()["status"]["conditions"] = [settled]
    (pod,) = world.pods.values()
    pod["status"]["containerStatuses"][0] |= {"restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert world.reason(C.UPDATED) == "False/RollingOut"
    world.roll_out()
    world.report()
    assert world.reason(C.PROGRESSING) == "False/Complete"
    assert world.reason(C.UPDATED) == "True/UpToDate"


@pytest.mark.parametrize(("written", "stored"), [("100m", "100000000n"), ("1500m", "1500000u"), ("1e3", "1k")])
def test_every_spelling_of_a_quantity_is_known(written: str, stored: str) -> None:
    """The API server stores quantities in a spelling of its own: an idle service is not applied again."""
    world = World(manifest(podTemplate={"resources": {"limits": {"cpu": written}}})).served()
    container = world.deployment()["spec"]["template"]["spec"]["containers"][0]
    container["resources"]["limits"] = {"cpu": stored}
    assert not world.reconcile().apply


def test_a_rollout_that_ends_under_a_refused_spec_is_reported() -> None:
    """Progressing stayed True/RollingOut for ever, and what the figures say stood still, while the pods served on."""
    world = rolling(profiling={"mode": "Skip"})
    world.settle()
    assert world.reason(C.PROGRESSING) == "True/RollingOut"
    world.patch(podTemplate={"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]})
    world.roll_out()
    world.report_states()
    world.figures = FigureWindows(error="nobody answers")
    world.settle()
    assert world.reason(C.SPEC_VALID) == "False/HostPathForbidden"
    assert world.reason(C.PROGRESSING) == "False/Stalled"
    assert "names /x of the node" in world.condition(C.PROGRESSING).message
    assert world.reason(C.GOODPUT_HEALTHY) == "Unknown/MetricsUnavailable"
    assert len({condition.observed_generation for condition in world.observed().status.conditions}) == 1


def test_nothing_stands_still_under_a_spec_that_cannot_be_read() -> None:
    """What is not known of it is Unknown, not what was the case before."""
    world = rolling(profiling={"mode": "Skip"})
    world.settle()
    world.patch(engine={"backend": "TensorRT"})
    world.replace_pods()
    assert world.reason(C.PROGRESSING) == "Unknown/Pending"
    assert world.reason(C.READY) == "True/EndpointReady"
    assert len({condition.observed_generation for condition in world.observed().status.conditions}) == 1


def test_lost_pod_after_a_rollout_stays_complete_in_any_words() -> None:
    """Whether a rollout is over was read back from the sentence of Progressing: other words began it again."""
    world = World(manifest()).served()
    revision = world.observed().status.revision
    assert revision is not None
    assert revision.phase == "Proven"
    for condition in world.services["chat"]["status"]["conditions"]:
        condition["message"] = "The words of another release."
    (pod,) = world.pods.values()
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.deployment()["status"] |= {"readyReplicas": 0, "availableReplicas": 0}
    world.settle()
    assert world.reason(C.PROGRESSING) == "False/Complete"
    assert world.reason(C.AVAILABLE).startswith("False/")
