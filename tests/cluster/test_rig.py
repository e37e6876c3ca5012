"""What every other test assumes of the cluster, tested on the session's cluster itself."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import audit
from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import PRODUCTS
from tests.cluster.spec import GPU_RESOURCE, PRODUCT_LABEL

pytestmark = pytest.mark.cluster
_NAMESPACE = "rig"
_SOON_S = 300.0
"""Seconds to wait for anything: a busy machine is slow, not wrong."""


@pytest.fixture(scope="module", autouse=True)
def namespace(cluster: Cluster) -> Iterator[None]:
    """A namespace of this module's own, gone at its end."""
    cluster.kubectl("create", "namespace", _NAMESPACE)
    cluster.wait_until("its service account", lambda: cluster.exists("serviceaccount", "default", _NAMESPACE), _SOON_S)
    yield
    cluster.kubectl("delete", "namespace", _NAMESPACE, "--wait=false")


def _pod(name: str, *command: str, **spec: Any) -> dict[str, Any]:
    """A pod under the security context that Outrider's own pods have."""
    container: dict[str, Any] = {
        "name": "main",
        "image": spec.pop("image", "outrider.local/standin:dev"),
        "command": list(command),
        "resources": spec.pop("resources", {}),
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    pod_context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    body = {"securityContext": pod_context, "containers": [container], "volumes": [{"name": "tmp", "emptyDir": {}}]}
    metadata = {"name": name, "namespace": _NAMESPACE, "labels": {"app": name}}
    quick = {"terminationGracePeriodSeconds": 0, "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**body, **quick, **spec}}


def _phase(cluster: Cluster, name: str) -> str:
    return str(cluster.get("pod", name, _NAMESPACE)["status"].get("phase"))


def _logs_when_done(cluster: Cluster, name: str) -> str:
    cluster.wait_until(f"the end of pod {name}", lambda: _phase(cluster, name) in ("Succeeded", "Failed"), _SOON_S)
    return cluster.kubectl("logs", name, "-n", _NAMESPACE)


def test_every_node_is_ready_and_claims_its_gpus(cluster: Cluster) -> None:
    """Three products means three kinds of node: profiling Jobs are tested on them."""
    nodes = {node["metadata"]["name"]: node for node in cluster.get("nodes")}
    cluster.wait_until("all take pods", lambda: cluster.ready_nodes() == set(nodes), _SOON_S)
    claimed = {
        node["metadata"]["labels"][PRODUCT_LABEL]: node["status"]["allocatable"][GPU_RESOURCE]
        for node in nodes.values()
        if PRODUCT_LABEL in node["metadata"]["labels"]
    }
    assert claimed == dict.fromkeys(PRODUCTS, "8")
    assert PRODUCT_LABEL not in nodes["node-1"]["metadata"]["labels"]


def test_a_pod_without_privileges_runs_this_checkout(cluster: Cluster) -> None:
    """Production's security context: not root, read-only root file system, no capability."""
    script = (
        "import os, outrider_crds; print(os.getuid(), outrider_crds.__file__);"
        "status = open('/proc/self/status').read();"
        "print([line.split()[1] for line in status.splitlines() if line.startswith('CapEff')]);"
        "open('/opt/outrider/checkout/new', 'w')"
    )
    cluster.apply(_pod("plain", "sh", "-c", f'which outrider-operator; python -c "{script}"'))
    log = _logs_when_done(cluster, "plain")
    assert "/opt/outrider/bin/outrider-operator" in log
    assert "65532 /opt/outrider/checkout/crds/outrider_crds/__init__.py" in log
    assert "['0000000000000000']" in log
    assert "Read-only file system" in log


def test_machine_reaches_service_exec_and_logs_of_a_pod(cluster: Cluster) -> None:
    """The demo sends its requests that way; kubectl logs and exec go through the kubelet."""
    cluster.apply(
        _pod("web", "python", "-m", "http.server", "8080", "--directory", "/opt/outrider/checkout/crds"),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web", "namespace": _NAMESPACE},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
        },
    )
    address = cluster.get("service", "web", _NAMESPACE)["spec"]["clusterIP"]
    page: list[bytes] = []

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://{address}/", timeout=2) as answer:
                page.append(answer.read())
        except OSError:
            return False
        return True

    cluster.wait_until("an answer of the Service", answers, _SOON_S)
    assert b"outrider_crds" in page[0]
    assert cluster.kubectl("exec", "web", "-n", _NAMESPACE, "--", "cat", "/proc/1/comm").strip() == "python"
    assert '"GET / HTTP/1.1" 200' in cluster.kubectl("logs", "web", "-n", _NAMESPACE)


def test_pod_token_may_do_only_what_its_role_grants(cluster: Cluster) -> None:
    """The operator works under such a token, with least privilege."""
    script = """
import os, ssl, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
for path in ("/version", "/api/v1/namespaces/rig/secrets"):
    url = "https://" + os.environ["KUBERNETES_SERVICE_HOST"] + path
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(f"{folder}/token").read()})
    try:
        print(path, urllib.request.urlopen(request, context=context).status)
    except urllib.error.HTTPError as error:
        print(path, error.code, error.read().decode())
"""
    cluster.apply(_pod("token", "python", "-c", script))
    log = _logs_when_done(cluster, "token")
    assert "/version 200" in log
    assert "/api/v1/namespaces/rig/secrets 403" in log
    assert "system:serviceaccount:rig:default" in log


def test_gpus_are_counted_when_pods_are_placed(cluster: Cluster) -> None:
    """A pod that asks for more than is left waits; "no room for the surge pod" is tested with that."""
    product = PRODUCTS[0]

    def wanting(name: str, gpus: int) -> dict[str, Any]:
        return _pod(
            name, "sleep", "600", nodeSelector={PRODUCT_LABEL: product}, resources={"limits": {GPU_RESOURCE: gpus}}
        )  # fmt: skip

    cluster.apply(wanting("takes-all", 8))
    cluster.wait_until("the pod that takes all", lambda: _phase(cluster, "takes-all") == "Running", _SOON_S)
    cluster.apply(wanting("takes-one", 1))

    def unschedulable() -> bool:
        conditions = cluster.get("pod", "takes-one", _NAMESPACE)["status"].get("conditions", [])
        return any(entry.get("reason") == "Unschedulable" for entry in conditions)

    cluster.wait_until("the scheduler's refusal", unschedulable, _SOON_S)
    cluster.kubectl("delete", "pod", "takes-all", "-n", _NAMESPACE)
    cluster.wait_until("its turn", lambda: _phase(cluster, "takes-one") == "Running", _SOON_S)
    node = cluster.get("pod", "takes-one", _NAMESPACE)["spec"]["nodeName"]
    assert cluster.get("node", node)["metadata"]["labels"][PRODUCT_LABEL] == product


def test_missing_image_fails_to_pull_until_it_is_imported(cluster: Cluster) -> None:
    """ErrImagePull is genuine, and an upgrade test gets a new image by giving ours a new name."""
    image = "outrider.local/standin:rig-test"
    cluster.apply(_pod("pulls", "sleep", "600", image=image))

    def reason() -> str:
        statuses = cluster.get("pod", "pulls", _NAMESPACE)["status"].get("containerStatuses", [{}])
        return str(statuses[0].get("state", {}).get("waiting", {}).get("reason"))

    cluster.wait_until("ErrImagePull", lambda: reason() in ("ErrImagePull", "ImagePullBackOff"), _SOON_S)
    cluster.import_image(image)
    cluster.apply(_pod("finds", "true", image=image))
    assert _logs_when_done(cluster, "finds") == ""
    assert _phase(cluster, "finds") == "Succeeded"


def test_a_changed_configmap_reaches_its_pod_within_seconds(cluster: Cluster) -> None:
    """What is hot must be hot in a test too; a kubelet's default would be up to a minute and a half."""

    def settings(mode: str) -> dict[str, Any]:
        metadata = {"name": "hot", "namespace": _NAMESPACE}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"mode": mode}}

    pod = _pod("reads", "sh", "-c", "until grep -q Off /hot/mode; do sleep 0.2; done; cat /hot/mode")
    pod["spec"]["volumes"].append({"name": "hot", "configMap": {"name": "hot"}})
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "hot", "mountPath": "/hot"})
    cluster.apply(settings("Closed"), pod)
    cluster.wait_until("the reader", lambda: _phase(cluster, "reads") == "Running", _SOON_S)
    changed = time.monotonic()
    cluster.apply(settings("Off"))
    assert _logs_when_done(cluster, "reads") == "Off"
    assert time.monotonic() - changed < 60


def test_restarted_api_server_has_its_old_data(cluster: Cluster) -> None:
    """Pods run on meanwhile; "the API server goes away for a minute" is tested with that."""
    cluster.apply(_pod("stays", "sleep", "600"))
    cluster.wait_until("the pod", lambda: _phase(cluster, "stays") == "Running", _SOON_S)
    before = cluster.get("pod", "stays", _NAMESPACE)["metadata"]["uid"]
    cluster.kill_apiserver()
    try:
        refused = cluster.try_kubectl("get", "pods", "--request-timeout=2s")
        assert refused.returncode != 0
        assert "refused" in refused.stderr
    finally:
        cluster.restart_apiserver()
    after = cluster.get("pod", "stays", _NAMESPACE)
    assert (after["metadata"]["uid"], after["status"]["phase"]) == (before, "Running")


def test_audit_log_names_the_user_of_each_write(cluster: Cluster) -> None:
    """Tests of the operator count its writes there."""
    cluster.kubectl("create", "configmap", "audited", "-n", _NAMESPACE)
    writes = audit.writes(cluster.layout.audit)
    mine = [entry for entry in writes if entry.get("objectRef", {}).get("name") == "audited"]
    assert [(entry["verb"], entry["user"]["username"]) for entry in mine] == [("create", "outrider-test-admin")]
    assert not [entry for entry in writes if entry["verb"] in ("get", "list", "watch")]


def test_a_network_policy_is_enforced_and_the_kubelet_passes_it(cluster: Cluster) -> None:
    """The policies of a pod's namespace decide which peers reach its port, as in production."""
    port = {"name": "web", "containerPort": 8080}
    web = _pod("guarded", "python", "-m", "http.server", "8080", "--directory", "/opt/outrider/checkout/crds")
    probe = {"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1}
    web["spec"]["containers"][0].update(ports=[port], readinessProbe=probe)
    allowed = {"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}], "ports": [{"port": "web"}]}
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "guard", "namespace": _NAMESPACE},
        "spec": {"podSelector": {"matchLabels": {"app": "guarded"}}, "ingress": [allowed]},
    }
    cluster.apply(policy, web, _pod("friend", "sleep", "600"), _pod("stranger", "sleep", "600"))

    def ready() -> bool:
        conditions = cluster.get("pod", "guarded", _NAMESPACE)["status"].get("conditions", [])
        return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)

    cluster.wait_until("the guarded pod, which its kubelet probes", ready, _SOON_S)
    for name in ("friend", "stranger"):
        cluster.wait_until(name, lambda name=name: _phase(cluster, name) == "Running", _SOON_S)  # type: ignore[misc]
    address = cluster.get("pod", "guarded", _NAMESPACE)["status"]["podIP"]
    ask = f"import urllib.request as u; print(u.urlopen('http://{address}:8080/', timeout=2).status)"

    def answered(name: str) -> bool:
        done = cluster.try_kubectl("exec", name, "-n", _NAMESPACE, "--", "python", "-c", ask)
        return done.stdout.strip() == "200"

    cluster.wait_until("the friend's answer", lambda: answered("friend"), _SOON_S)
    assert not answered("stranger")
    cluster.kubectl("delete", "networkpolicy", "guard", "-n", _NAMESPACE)
    cluster.wait_until("the stranger's answer, with the policy gone", lambda: answered("stranger"), _SOON_S)
