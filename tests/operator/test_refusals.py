"""A refused write stops only dependent objects; objects of others stay as they are."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import pytest
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_kube_config
from outrider_operator.cluster.api_error import ApiError
from outrider_operator.cluster.kubernetes_api import KubernetesApi
from outrider_operator.controller.service_controller import MOST_OF_A_NAMESPACE
from outrider_operator.kinds import CONFIG_MAP, DEPLOYMENT, KUBERNETES_SERVICE, SERVICE

from tests.cluster import audit
from tests.cluster.cluster import Cluster
from tests.operator import manifests, webhook
from tests.operator.client import Client, Service, uids, wait_for
from tests.operator.conftest import Make
from tests.operator.manifests import environment
from tests.operator.process import OperatorProcess

pytestmark = pytest.mark.cluster

BROKEN_WEBHOOK = "tests-broken"
TOUCH = {"metadata": {"annotations": {"example.com/touched": "now"}}}


Refuse = Callable[[str, str, str, tuple[str, ...]], None]
"""refuse(group, resource, expression, example): HTTP 500 for the objects that the CEL expression is true of, from its
return on. example: arguments with which kubectl writes such an object."""


Slow = tuple[str, webhook.HoldingWebhook]
"""A namespace and its webhook."""


@pytest.fixture
def refuse(cluster: Cluster, namespace: str) -> Generator[Refuse, None, None]:
    """A webhook without a server, for objects of the module's namespace."""

    def add(group: str, resource: str, expression: str, example: tuple[str, ...]) -> None:
        conditions = [{"name": "marked", "expression": expression}]
        unreachable = {"url": "https://127.0.0.1:9/"}
        webhook.configure(
            cluster, BROKEN_WEBHOOK, namespace, unreachable, group=group, resource=resource, matchConditions=conditions,
            timeoutSeconds=1,
        )  # fmt: skip
        dry_run = (*example, "--dry-run=server", "-n", namespace)
        wait_for("the webhook", lambda: BROKEN_WEBHOOK in cluster.try_kubectl(*dry_run).stderr)

    yield add
    cluster.kubectl("delete", webhook.KIND, BROKEN_WEBHOOK, "--ignore-not-found")


@pytest.fixture
def never_pulled(cluster: Cluster, namespace: str) -> Generator[None, None, None]:
    """A policy of the platform: the pods of every Deployment in the module's namespace pull no image."""
    name = f"never-pull-{namespace}"
    kind, metadata = {"apiVersion": "admissionregistration.k8s.io/v1"}, {"metadata": {"name": name}}
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    change = (
        "Object{spec: Object.spec{template: Object.spec.template{spec: Object.spec.template.spec{containers: "
        '[Object.spec.template.spec.containers{name: "runtime", imagePullPolicy: "Never"}]}}}}'
    )
    policy = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {
            "resourceRules": [{**rule, "resources": ["deployments"]}],
            "namespaceSelector": selector,
        },
        "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": change}}],
    }
    cluster.apply(
        {**kind, "kind": "MutatingAdmissionPolicy", **metadata, "spec": policy},
        {**kind, "kind": "MutatingAdmissionPolicyBinding", **metadata, "spec": {"policyName": name}},
    )
    yield
    cluster.kubectl("delete", "mutatingadmissionpolicybinding,mutatingadmissionpolicy", name)


@pytest.fixture
def slow(cluster: Cluster, tmp_path: Path) -> Generator[Slow, None, None]:
    """A namespace in which nothing of Outrider's is written before its webhook is released."""
    name = f"slow-{uuid.uuid4().hex[:4]}"
    ours = "'app.kubernetes.io/managed-by' in object.metadata.?labels.orValue({})"
    with webhook.HoldingWebhook(cluster.machine_address, tmp_path) as holding:
        conditions = [{"name": "ours", "expression": ours}]
        webhook.configure(
            cluster, name, name, holding.client, group="", resource="*", matchConditions=conditions, timeoutSeconds=30
        )
        cluster.kubectl("create", "namespace", name)
        yield name, holding
    cluster.kubectl("delete", webhook.KIND, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def test_a_revision_map_that_a_quota_refuses_is_not_rolled_out(make: Make, cluster: Cluster, namespace: str) -> None:
    """The pods serve on, also where the rollout may take one away first; once there is room the rollout goes on."""
    service = make("quota", profiling={"mode": "Skip"}, rollout={"maxSurge": 0, "maxUnavailable": 1})
    service.wait_updated()
    before = uids(service.ready_pods())
    used = len(service.client.list(CONFIG_MAP, namespace))
    cluster.kubectl("create", "quota", "full", f"--hard=count/configmaps={used}", "-n", namespace)
    wait_for("the quota to count", lambda: _used(cluster, namespace, "count/configmaps") == str(used))
    service.patch({"engine": {"maxModelLen": 512}})
    assert "exceeded quota" in service.wait("SpecValid", "False", "ChildRejected")["message"]
    assert service.condition("Updated")["reason"] == "ChildRejected"
    assert service.condition("Progressing")["reason"] == "Stalled"
    assert uids(service.ready_pods()) == before
    cluster.kubectl("delete", "quota", "full", "-n", namespace)
    service.wait_updated()
    assert uids(service.ready_pods()).isdisjoint(before)


def test_a_service_that_another_made_is_not_taken_over(
    make: Make, refuse: Refuse, cluster: Cluster, client: Client, namespace: str
) -> None:
    """Ours was refused, theirs came into its place: theirs stays as it is, and stays when ours is deleted."""
    refuse("", "services", "has(object.metadata.labels)", ("create", "service", "clusterip", "probe", "--tcp=80"))
    ours = make("taken", profiling={"mode": "Skip"})
    assert BROKEN_WEBHOOK in ours.wait("SpecValid", "False", "ChildRejected")["message"]
    theirs = {"metadata": {"name": "taken", "namespace": namespace}, "spec": {"ports": [{"port": 1234}]}}
    made = client.create(KUBERNETES_SERVICE, theirs)
    cluster.kubectl("delete", webhook.KIND, BROKEN_WEBHOOK)
    ours.wait("SpecValid", "False", "NameConflict")
    client.delete(SERVICE, namespace, "taken")
    wait_for("the Deployment to go", lambda: client.get(DEPLOYMENT, namespace, "taken") is None)
    present = client.get(KUBERNETES_SERVICE, namespace, "taken")
    assert present is not None
    for field in ("uid", "resourceVersion"):
        assert present["metadata"][field] == made["metadata"][field]


def test_template_that_fails_with_500_blocks_no_other_change(make: Make, refuse: Refuse) -> None:
    """HTTP 500 for the new pods: a condition says so, and the change of scale in the same edit is applied."""
    service = make("webhook", profiling={"mode": "Skip"})
    service.wait_updated()
    revision = service.revision
    marked = "object.spec.template.spec.containers.exists(c, c.env.exists(e, e.name == 'REFUSE'))"
    refuse("apps", "deployments", marked, ("set", "env", "deployment/webhook", "REFUSE=me"))
    service.patch({"engine": {"env": [*environment(), {"name": "REFUSE", "value": "me"}]}, "replicas": 2})
    assert BROKEN_WEBHOOK in service.wait("SpecValid", "False", "ChildRejected")["message"]
    assert service.condition("Updated")["reason"] == "ChildRejected"
    wait_for("two pods of the old revision", lambda: len(service.ready_pods()) == 2)
    assert service.revision == revision
    service.patch({"engine": {"env": environment()}})
    service.wait_updated()
    assert service.condition("SpecValid")["status"] == "True"


@pytest.mark.usefixtures("never_pulled")
def test_policy_that_rewrites_images_is_reported_not_fought(make: Make, cluster: Cluster) -> None:
    """Each look applied the Deployment again, which changed nothing: six writes a second for one service."""
    service = make("rewritten", replicas=0, profiling={"mode": "Skip"})
    service.wait_updated()

    def is_rewritten() -> bool:
        """The API server takes a policy up some seconds after it was made."""
        service.client.patch(DEPLOYMENT, service.namespace, service.name, TOUCH)
        container = service.child(DEPLOYMENT)["spec"]["template"]["spec"]["containers"][0]
        return bool(container["imagePullPolicy"] == "Never")

    wait_for("the policy", is_rewritten)
    wait_for("the condition", lambda: "imagePullPolicy" in service.condition("SpecValid")["message"])
    assert service.condition("SpecValid")["status"] == "True"
    service.wait_updated()
    before = _writes(cluster, service)
    time.sleep(10)  # it is tried again after 2, 4, 8 ... seconds
    assert _writes(cluster, service) - before < 10
    service.patch({"replicas": 1})
    service.wait_updated()


def test_slow_webhook_delays_its_own_namespace_only(slow: Slow, make: Make, client: Client) -> None:
    """Services whose writes hang had every worker of the operator, and a neighbour got no status. The denial that comes
    at last is reported, though it has the status of a busy server."""
    namespace, holding = slow
    names = [f"s-{number}" for number in range(MOST_OF_A_NAMESPACE + 4)]
    for name in names:
        client.create(SERVICE, manifests.service(name, namespace, replicas=0, profiling={"mode": "Skip"}))
    wait_for("calls that hang", lambda: holding.waiting >= MOST_OF_A_NAMESPACE)
    numbers = itertools.count()

    def is_served_at_once() -> bool:
        """True if no held call was given up meanwhile, as on a busy machine; else another neighbour is tried."""
        before = holding.given_up
        neighbour = make(f"neighbour-{next(numbers)}", replicas=0, profiling={"mode": "Skip"})
        wait_for("its conditions", lambda: neighbour.read()["status"].get("conditions"))
        return before == holding.given_up

    wait_for("a neighbour that is served at once", is_served_at_once)
    holding.release()
    for name in names:
        wait_for("the denial", partial(_says, Service(client, namespace, name), "SpecValid", "the policy says no"))


def test_a_quota_on_pods_is_named_where_it_keeps_profiling_away(make: Make, cluster: Cluster, namespace: str) -> None:
    """The Job is there and its pod is not: no condition said why."""
    cluster.kubectl("create", "quota", "no-pods", "--hard=pods=0", "-n", namespace)
    wait_for("the quota to count", lambda: _used(cluster, namespace, "pods") is not None)
    service = make("unmeasured", replicas=0)
    wait_for("the quota's name", lambda: "quota: no-pods" in service.condition("ProfilesReady").get("message", ""))
    assert service.condition("ProfilesReady")["reason"] == "Learning"
    assert service.condition("SpecValid")["status"] == "True"
    cluster.kubectl("delete", "quota", "no-pods", "-n", namespace)


def test_what_a_spec_no_longer_says_leaves_the_pods(make: Make) -> None:
    """Children are created first and applied later: what only the creation said must not stay for ever."""
    labelled = {"labels": {"team": "a"}}
    service = make("drops", profiling={"mode": "Skip"}, replicas=0, podTemplate=labelled)
    service.wait_updated()
    service.patch({"podTemplate": None})
    service.wait_updated()
    template = service.child(DEPLOYMENT)["spec"]["template"]
    assert "team" not in template["metadata"]["labels"]
    assert "Update" not in _operations(service)


@pytest.mark.parametrize("name", ["seen-hot", "nobody-has-it"])
async def test_an_apply_touches_no_object_but_the_one_that_was_seen(
    name: str, make: Make, client: Client, namespace: str, cluster: Cluster
) -> None:
    """Another object may take the name before the write, or the object may go: the operator's request names the
    uid, and the API server compares it."""
    if client.get(SERVICE, namespace, "seen") is None:
        make("seen", profiling={"mode": "Skip"}, replicas=0).wait_updated()
    before = client.get(CONFIG_MAP, namespace, name)
    metadata = {"name": name, "namespace": namespace, "uid": "00000000-0000-0000-0000-000000000000"}
    configuration = Configuration()
    await load_kube_config(str(cluster.kubeconfig), client_configuration=configuration, persist_config=False)
    api = KubernetesApi(configuration)
    with pytest.raises(ApiError) as refused:
        await api.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"config.json": "{}"}})
    await api.close()
    assert refused.value.status in (409, 422)
    assert client.get(CONFIG_MAP, namespace, name) == before


def _writes(cluster: Cluster, service: Service) -> int:
    """How often the operator wrote objects of the service's name: services of other tests may be going meanwhile."""
    written = [entry for entry in audit.writes(cluster.layout.audit) if entry.get("userAgent") == "outrider-operator"]
    objects = [entry.get("objectRef", {}) for entry in written]
    return sum((it.get("namespace"), it.get("name")) == (service.namespace, service.name) for it in objects)


def _says(service: Service, kind: str, words: str) -> bool:
    return words in service.condition(kind).get("message", "")


def _operations(service: Service) -> set[str]:
    """How the operator wrote the Deployment, its status aside."""
    entries = service.child(DEPLOYMENT)["metadata"]["managedFields"]
    return {entry["operation"] for entry in entries if entry["manager"] == "outrider" and not entry.get("subresource")}


def _used(cluster: Cluster, namespace: str, resource: str) -> str | None:
    """What the namespace's quota counts of `resource`."""
    quotas = cluster.get("quota", namespace=namespace)
    return next((entry.get("status", {}).get("used", {}).get(resource) for entry in quotas), None)


def test_namespace_that_is_deleted_gives_no_warnings(
    cluster: Cluster, client: Client, operator_process: OperatorProcess
) -> None:
    """Three services gave 33: each child was made again while the namespace went, and each Event was refused."""
    namespace = f"leaving-{uuid.uuid4().hex[:4]}"
    cluster.kubectl("create", "namespace", namespace)
    for name in ("a", "b", "c"):
        client.create(SERVICE, manifests.service(name, namespace))
    for name in ("a", "b", "c"):
        Service(client, namespace, name).wait_updated()
    cluster.kubectl("delete", "namespace", namespace, "--timeout=300s", timeout_s=330)
    lines = [line for line in operator_process.log_text().splitlines() if namespace in line]
    assert lines
    assert [line for line in lines if "[INFO " not in line] == []
