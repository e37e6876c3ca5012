"""The pod template: least privilege, room to write, models, tokens, drains."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_operator.cluster_model import DEPLOYMENT, DISRUPTION_BUDGET, JOB, KUBERNETES_SERVICE, Object

from tests.unit.operator.decide.world import EAGLE, World, gpu_node, manifest, settings_with


def template(**spec: Any) -> Object:
    world = World(manifest(**spec), nodes=(gpu_node("a", "NVIDIA-L4"),)).settled()
    result: Object = world.deployment()["spec"]["template"]
    return result


def container(**spec: Any) -> Object:
    result: Object = template(**spec)["spec"]["containers"][0]
    return result


def test_pods_run_without_privileges() -> None:
    """Non-root, read-only root, nothing to escalate, no token, no service links."""
    pod = template()["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = pod["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("kind", [DEPLOYMENT, JOB])
def test_where_the_platform_assigns_users_pods_name_none(kind: str) -> None:
    """OpenShift refuses a pod whose user or group is not of its namespace's range; it fills in what is absent."""
    for assigned in (False, True):
        world = World(manifest(), settings=settings_with(platform_assigns_user=assigned)).settled()
        world.replace_pods()
        (child,) = [document for (result, _), document in world.objects.items() if result == kind]
        security = child["spec"]["template"]["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert ({"runAsUser", "runAsGroup", "fsGroup"} & set(security) == set()) is assigned


def test_everything_that_must_be_writable_is_a_volume() -> None:
    """/tmp, HOME, caches, the run folder; /dev/shm in memory."""
    pod = template()["spec"]
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"] if not m.get("readOnly")}
    environment = {v["name"]: v.get("value", "") for v in pod["containers"][0]["env"]}
    for variable in ("HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "OUTRIDER_RUN_DIR"):
        assert any(environment[variable].startswith(path) for path in mounts), variable
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert {"/tmp", "/var/cache/outrider"} <= set(mounts)


def test_a_pod_has_time_to_start_and_to_drain() -> None:
    """Start-up budget = progressDeadline; endpoints go first; grace covers drainTimeout."""
    pod = template(rollout={"progressDeadline": "5m", "drainTimeout": "90s"})["spec"]
    runtime = pod["containers"][0]
    assert runtime["startupProbe"]["periodSeconds"] * runtime["startupProbe"]["failureThreshold"] == 300
    assert runtime["lifecycle"]["preStop"]["sleep"]["seconds"] > 0
    assert pod["terminationGracePeriodSeconds"] > 90 + runtime["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert runtime["args"][-2:] == ["--drain-timeout", "90s"]


def test_the_hubs_token_comes_from_the_secret_by_reference() -> None:
    """The operator never reads a Secret."""
    source = {"hub": {"tokenSecretRef": {"name": "hf", "key": "t"}}}
    env = container(target={"name": "org/gated", "source": source})["env"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "t"}}} in env


def test_models_on_claims_are_mounted_read_only_for_the_runtime() -> None:
    """<MODEL_VOLUMES_DIR>/target and /draft-<drafter>."""
    claim = {"pvc": {"claimName": "models", "path": "a/b"}}
    draft = {**EAGLE, "eagle": {"model": {"name": "org/eagle", "source": claim}}}
    mounts = container(target={"name": "m", "source": claim}, draftPool=[draft])["volumeMounts"]
    result = {m["mountPath"]: m.get("readOnly") for m in mounts}
    assert result["/var/lib/outrider/models/target"] is True
    assert result["/var/lib/outrider/models/draft-eagle"] is True


@pytest.mark.parametrize("name", ["target", "cache"])
def test_a_draft_may_have_any_name(name: str) -> None:
    """None makes two volumes of one name: the API server would refuse the Deployment."""
    source = {"pvc": {"claimName": "models", "path": "a"}}
    draft = {**EAGLE, "name": name, "eagle": {"model": {"name": "org/eagle", "source": source}}}
    pod = template(target={"name": "m", "source": source}, draftPool=[draft])
    volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
    assert len(set(volumes)) == len(volumes)


def test_pod_template_of_a_user_never_replaces_the_product() -> None:
    """Node affinity terms are alternatives: the product stands in each."""
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [z]}]} for z in ("a", "b")]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    pod = template(
        accelerator={"products": ["NVIDIA-L4"], "nodeSelector": {"pool": "x"}},
        podTemplate={
            "affinity": {"nodeAffinity": required},
            "labels": {"team": "a"},
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
            "priorityClassName": "high",
        },
    )
    rendered = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    for term, zone in zip(rendered["nodeSelectorTerms"], ("a", "b"), strict=True):
        assert term["matchExpressions"][0]["values"] == [zone]
        assert term["matchExpressions"][1] == {
            "key": "nvidia.com/gpu.product",
            "operator": "In",
            "values": ["NVIDIA-L4"],
        }
    names = [v["name"] for v in pod["spec"]["containers"][0]["env"]]
    assert len(names) == len(set(names)), "a list with two variables of a name cannot be applied"
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["spec"]["nodeSelector"] == {"pool": "x"}
    assert pod["spec"]["priorityClassName"] == "high"


def test_a_gpu_pod_asks_for_its_gpus_and_a_cpu_pod_for_none() -> None:
    """nvidia.com/gpu limits from the accelerator; cpu is a first-class case without affinity."""
    gpus = container(accelerator={"products": ["NVIDIA-L4"], "count": 4}, engine={"tensorParallelSize": 4})
    assert gpus["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert "affinity" not in template()["spec"]
    assert "resources" not in container()


def test_service_hides_admin_port_and_budget_frees_broken_pods() -> None:
    """Tenancy: state, metrics and probes are not behind the Service."""
    world = World(manifest()).settled()
    assert [p["targetPort"] for p in world.objects[KUBERNETES_SERVICE, "chat"]["spec"]["ports"]] == [8000]
    budget = world.objects[DISRUPTION_BUDGET, "chat"]["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
