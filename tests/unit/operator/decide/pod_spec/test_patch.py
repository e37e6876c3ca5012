"""podTemplate on the pods: any field of Kubernetes' goes in, and nothing takes a pod out of Outrider's hands."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.conditions import ConditionType
from outrider_crds.manifest import load_manifest
from outrider_crds.pod_template import PodTemplate
from outrider_crds.profile_keys import profile_keys
from outrider_operator.cluster_model import DEPLOYMENT, Node, OperatorSettings, ServiceIdentity
from outrider_operator.decide.pod_spec.patch import merged, patch_problems
from outrider_operator.decide.pod_spec.placement import has_node
from outrider_operator.decide.pod_spec.template import pod_template
from outrider_operator.decide.profiling.jobs import job_manifest
from outrider_operator.decide.profiling.measurement_request import MeasurementRequest
from outrider_operator.validation.reports import PROFILER

from tests import corpus
from tests.unit.operator.decide.world import World, manifest

FIELDS = st.sampled_from([
    "affinity", "containers", "initContainers", "volumes", "volumeMounts", "securityContext", "name", "ports",
    "seccompProfile", "type", "seLinuxOptions", "sysctls", "drop", "runAsUser", "user",
    "resources", "limits", "claims", "tolerations", "nodeSelector", "nodeAffinity", "env", "capabilities", "add",
    "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms", "hostPath", "topologySpreadConstraints",
])  # fmt: skip
SETTINGS = OperatorSettings(runtime_image_gpu="gpu", runtime_image_cpu="cpu")
SPEC = load_manifest(corpus.good()["pod-patch"]).spec
KEYS = profile_keys(SPEC, "NVIDIA-H200", "gpu")


def serving_pod() -> dict[str, Any]:
    spec: dict[str, Any] = pod_template(SPEC, SETTINGS, "chat", "r", "gpu", [KEYS])["spec"]
    return spec


def profiling_pod() -> dict[str, Any]:
    request = MeasurementRequest(keys=KEYS, target=True, drafters=(), attempt="a", reprofile="")
    job = job_manifest(ServiceIdentity("chat", "ns", "uid"), SETTINGS, SPEC, "gpu", request)
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("pod", [serving_pod(), profiling_pod()], ids=["serving", "profiling"])
def test_pod_takes_fields_that_outrider_does_not_know(pod: dict[str, Any]) -> None:
    """IRSA, workload identity, AMD's groups, DRA, projected and image volumes: all were refused as unknown fields."""
    assert pod["serviceAccountName"] == "models"
    assert pod["securityContext"]["supplementalGroups"] == [44, 109]
    assert pod["securityContext"]["runAsNonRoot"] is True, "what the patch does not name stays"
    assert pod["dnsConfig"] == {"options": [{"name": "ndots", "value": "2"}]}
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-h200"}]
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["spot"]
    assert pod["initContainers"][0]["name"] == "warm"
    kinds = {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]}
    assert (kinds["model"], kinds["token"], kinds["scratch"]) == ({"image"}, {"projected"}, {"ephemeral"})
    assert kinds["outrider-target" if "outrider-target" in kinds else "outrider-shm"] == {"emptyDir"}


def test_runtime_container_is_patched_by_its_name() -> None:
    """A profiling pod calls it otherwise, and leaves sidecars out, which would outlive the measurement."""
    runtime, sidecar = serving_pod()["containers"]
    (profiler,) = profiling_pod()["containers"]
    assert (runtime["name"], sidecar["name"], profiler["name"]) == ("runtime", "sidecar", PROFILER)
    for container in (runtime, profiler):
        assert container["securityContext"]["seccompProfile"]["type"] == "Localhost"
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_claims_take_the_place_of_the_device_plugin() -> None:
    """No node offers nvidia.com/gpu where DRA does: a pod that asks for both is never scheduled."""
    assert serving_pod()["containers"][0]["resources"] == {"claims": [{"name": "gpu"}]}


def test_claims_have_profiles_of_their_own() -> None:
    """A claim of a slice and one of the whole device are not equally fast."""
    claims = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "slice"}]}
    other = SPEC.pod_template.model_copy(update={"others": {**SPEC.pod_template.others, **claims}})
    assert profile_keys(SPEC.model_copy(update={"pod_template": other}), "NVIDIA-H200", "gpu").target != KEYS.target


@pytest.mark.parametrize(
    ("label", "taint", "room"), [("inference", "spot", True), ("training", "spot", False), ("inference", "x", False)]
)
def test_job_finds_nodes_by_the_patch(label: str, taint: str, room: bool) -> None:
    """Its tolerations and node labels are the pod's; with claims no node need offer the plugin's resource."""
    labels = {"pool": label, "nvidia.com/gpu.product": "NVIDIA-H200"}
    node = Node("a", labels=labels, taints=({"key": taint, "effect": "NoSchedule"},))
    assert has_node([node], SPEC, "NVIDIA-H200", admitted=[]) is room


def test_merge_follows_kubernetes() -> None:
    """Maps by key, lists by their merge key, other lists whole; null removes."""
    base = {"a": {"b": 1, "c": 2}, "volumes": [{"name": "x", "emptyDir": {}}], "args": ["1"], "gone": 1}
    patch = {"a": {"b": None, "d": 3}, "volumes": [{"name": "y"}, {"name": "x", "z": 1}], "args": ["2"], "gone": None}
    assert merged(base, patch) == {
        "a": {"c": 2, "d": 3},
        "volumes": [{"name": "x", "emptyDir": {}, "z": 1}, {"name": "y"}],
        "args": ["2"],
    }


def _runtime(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "runtime", **fields}]}


def _sidecar(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "side", "image": "x", **fields}]}


HOSTILE = {
    "hostNetwork": {"hostNetwork": True},
    "hostPID": {"hostPID": True},
    "hostIPC": {"hostIPC": True},
    "nodeName": {"nodeName": "node-1"},
    "restartPolicy": {"restartPolicy": "Never"},
    "terminationGracePeriodSeconds": {"terminationGracePeriodSeconds": 1},
    "command": _runtime(command=["sh"]),
    "readinessProbe": _runtime(readinessProbe={}),
    "args": _runtime(args=[]),
    "privileged": _sidecar(securityContext={"privileged": True}),
    "allowPrivilegeEscalation": _runtime(securityContext={"allowPrivilegeEscalation": True}),
    "capabilities.add": _sidecar(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    "hostPort": _sidecar(ports=[{"containerPort": 1, "hostPort": 80}]),
    "ports names 8000": _sidecar(ports=[{"containerPort": 8000}]),
    "a volume of Outrider's": {"initContainers": [{"name": "i", "volumeMounts": [{"name": "outrider-hot"}]}]},
    "resources": _runtime(resources={"limits": {"cpu": 1}}),
    "podTemplate.securityContext must": {"securityContext": None},
    "podTemplate.containers must": {"containers": None},
    "containers[runtime].securityContext must": _runtime(securityContext=None),
    "hostProcess": {"securityContext": {"windowsOptions": {"hostProcess": True}}},
}


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_patch_is_refused_by_name(word: str) -> None:
    """Issue 40: a condition with a sentence, and the pods that run stay as they are."""
    assert word in "; ".join(patch_problems(PodTemplate.model_validate(HOSTILE[word])))
    world = World(manifest()).settled()
    before = world.objects[DEPLOYMENT, "chat"]["spec"]
    world.change(podTemplate=HOSTILE[word])
    assert world.reason(ConditionType.SPEC_VALID) == "False/InvalidSpec"
    assert word in world.condition(ConditionType.SPEC_VALID).message
    assert world.objects[DEPLOYMENT, "chat"]["spec"] == before


UNCONFINED = {"type": "Unconfined"}
LEAVES_BASELINE: dict[str, dict[str, Any]] = {
    "seccompProfile": {"seccompProfile": UNCONFINED},
    "seccompProfile takes": {"seccompProfile": {"type": None}},
    "appArmorProfile": {"appArmorProfile": UNCONFINED},
    "seLinuxOptions.type spc_t": {"seLinuxOptions": {"type": "spc_t"}},
    "seLinuxOptions.user": {"seLinuxOptions": {"user": "system_u"}},
    "seLinuxOptions.role": {"seLinuxOptions": {"role": "sysadm_r"}},
    "windowsOptions.hostProcess": {"windowsOptions": {"hostProcess": True}},
}
WEAKENS_RUNTIME: dict[str, dict[str, Any]] = {
    "allowPrivilegeEscalation": {"allowPrivilegeEscalation": None},
    "capabilities must": {"capabilities": None},
    "capabilities.drop": {"capabilities": {"drop": None}},
    "capabilities.drop must": {"capabilities": {"drop": ["NET_RAW"]}},
    "readOnlyRootFilesystem": {"readOnlyRootFilesystem": None},
    "readOnlyRootFilesystem must": {"readOnlyRootFilesystem": False},
    "runAsNonRoot": {"runAsNonRoot": False},
    "runAsNonRoot must": {"runAsNonRoot": None},
    "runAsUser": {"runAsUser": 0},
    "seccompProfile must": {"seccompProfile": None},
}
WEAKENS_POD: dict[str, dict[str, Any]] = {
    "runAsNonRoot": {"runAsNonRoot": None},
    "runAsUser": {"runAsUser": 0},
    "seccompProfile must": {"seccompProfile": None},
    "sysctls sets kernel.msgmax": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]},
    "sysctls sets net/ipv4/ip_forward": {"sysctls": [{"name": "net/ipv4/ip_forward", "value": "1"}]},
}


def _said(patch: dict[str, Any]) -> str:
    return "; ".join(patch_problems(PodTemplate.model_validate(patch)))


@pytest.mark.parametrize("word", LEAVES_BASELINE)
def test_security_context_below_baseline_is_refused(word: str) -> None:
    """Only privileged and added capabilities were: Unconfined and spc_t took any container out of its sandbox."""
    context = {"securityContext": LEAVES_BASELINE[word]}
    init = {"initContainers": [{"name": "i", "image": "x", **context}]}
    for patch in (context, _runtime(**context), _sidecar(**context), init):
        assert f"securityContext.{word}" in _said(patch)


@pytest.mark.parametrize("word", WEAKENS_RUNTIME)
def test_runtime_context_weaker_than_outriders_is_refused(word: str) -> None:
    """Null removes what Outrider sets, as a patch does: capabilities and escalation came back."""
    context = {"securityContext": WEAKENS_RUNTIME[word]}
    assert f"[runtime].securityContext.{word}" in _said(_runtime(**context))
    assert not _said(_sidecar(**context)), "a sidecar's image may need it, and baseline has it"


@pytest.mark.parametrize("word", WEAKENS_POD)
def test_pod_context_weaker_than_outriders_is_refused(word: str) -> None:
    """The runtime container has its seccomp profile from the pod."""
    assert f"spec.podTemplate.securityContext.{word}" in _said({"securityContext": WEAKENS_POD[word]})


def test_annotation_that_turns_apparmor_off_is_refused() -> None:
    """Kubelets before 1.30 read annotations, and the API server still turns them into fields."""
    name = "container.apparmor.security.beta.kubernetes.io/runtime"
    assert name in _said({"annotations": {name: "unconfined"}})
    assert not _said({"annotations": {name: "localhost/gpu"}})


@pytest.mark.parametrize(
    "context",
    [
        {"runAsUser": 1000650000, "runAsGroup": 0, "fsGroup": None, "supplementalGroups": [44, 109]},
        {"seccompProfile": {"type": "Localhost", "localhostProfile": "gpu.json"}, "runAsNonRoot": True},
        {"appArmorProfile": {"type": "RuntimeDefault"}, "seLinuxOptions": {"type": "container_t", "level": "s0:c1"}},
        {"sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "60"}], "appArmorProfile": None},
    ],
)
def test_security_context_within_baseline_is_accepted(context: dict[str, Any]) -> None:
    """docs/how-to/shape-pods.md promises groups of AMD's devices, and a platform may choose the user."""
    assert not _said({"securityContext": context})
    runtime = {name: value for name, value in context.items() if name not in ("fsGroup", "sysctls")}
    ours = {"capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    assert not _said(_runtime(securityContext={**runtime, **ours}))


@pytest.mark.parametrize("value", [0, None, "", False])
@pytest.mark.parametrize("name", ["terminationGracePeriodSeconds", "restartPolicy", "activeDeadlineSeconds"])
def test_reserved_field_is_refused_with_an_empty_value(name: str, value: object) -> None:
    """terminationGracePeriodSeconds: 0 or null went through: pods were killed without draining."""
    assert name in "; ".join(patch_problems(PodTemplate.model_validate({name: value})))


def test_host_boolean_is_accepted_as_false_only() -> None:
    """Policies of other clusters write hostNetwork: false, which changes nothing; null is as good as a typo."""
    assert not list(
        patch_problems(PodTemplate.model_validate({"hostNetwork": False, "hostPID": False, "hostIPC": False}))
    )
    assert list(patch_problems(PodTemplate.model_validate({"hostNetwork": None})))


def test_patch_that_writes_to_the_node_is_refused() -> None:
    """hostPath is for reading, in whichever container."""
    volume = {"name": "host", "hostPath": {"path": "/models"}}
    side = {"name": "side", "image": "x", "volumeMounts": [{"name": "host", "mountPath": "/m"}]}
    world = World(manifest(podTemplate={"volumes": [volume], "containers": [side]}))
    world.settings = OperatorSettings(runtime_image_gpu="gpu", runtime_image_cpu="cpu", allowed_host_paths=("/models",))
    world.settle()
    message = world.condition(ConditionType.SPEC_VALID).message
    assert "could write to the node: add readOnly: true" in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "runtime", "outrider-x", "a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(FIELDS, inner, max_size=3),
    max_leaves=12,
)


@given(patch=st.dictionaries(FIELDS, JSON, max_size=4))
@pytest.mark.slow
def test_no_patch_ends_the_operator(patch: dict[str, Any]) -> None:
    """The CRD keeps whatever it does not know; a decision that raised would be tried for ever."""
    world = World(manifest(podTemplate=patch))
    world.reconcile()


@pytest.mark.parametrize(
    "handler",
    [
        {"livenessProbe": {"httpGet": {"host": "169.254.169.254", "port": 80}}},
        {"startupProbe": {"tcpSocket": {"host": "10.0.0.1", "port": 80}}},
        {"lifecycle": {"postStart": {"httpGet": {"host": "127.0.0.1", "port": 10255}}}},
        {"lifecycle": {"preStop": {"tcpSocket": {"host": "127.0.0.1", "port": 10255}}}},
    ],
)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_handler_that_calls_another_host_is_refused(kind: str, handler: dict[str, Any]) -> None:
    """Pod Security baseline forbids it since 1.34: the kubelet calls any address for a tenant."""
    template = PodTemplate.model_validate({kind: [{"name": "sidecar", "image": "x", **handler}]})
    (sentence,) = patch_problems(template)
    assert ".host makes the node call that host" in sentence
