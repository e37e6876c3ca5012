"""The chart on a cluster: install, upgrade, render, and the values under which it runs there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from setup.steps import REPOSITORY
from tests.cluster.errors import ClusterError
from tests.cluster.kubectl import Kubectl

CHART = REPOSITORY / "charts" / "outrider"
SYSTEM = "outrider-system"
RELEASE = "outrider"
# The runtime image of services that name none: the previous chart's and this one's must differ to tell them apart.
PREVIOUS_RUNTIME = "outrider.local/standin:dev"
PRESENT_RUNTIME = "outrider.local/runtime-cpu:dev"


def install(cluster: Kubectl, verb: str, chart: Path, values_file: str, namespace: str = SYSTEM) -> None:
    """`helm install` or `helm upgrade` of the release, until its operator is ready; else ClusterError with its log."""
    try:
        cluster.helm(
            verb, RELEASE, str(chart), "-n", namespace, "-f", values_file, "--wait", "--timeout", "600s",
            *(["--create-namespace"] if verb == "install" else []),
        )  # fmt: skip
    except ClusterError as error:
        log = cluster.try_kubectl("logs", "-n", namespace, f"deployment/{RELEASE}", "--tail=30")
        raise ClusterError(f"{error}\nThe operator's log:\n{log.stdout}{log.stderr}") from None


def values(runtime: str = PRESENT_RUNTIME, **more: Any) -> dict[str, Any]:
    """Values for the local cluster: its images are the checkout."""
    return {
        "operator": {"image": {"repository": "outrider.local/operator", "tag": "dev"}},
        "runtime": {"image": {"cpu": runtime, "gpu": runtime}},
        "allowedHostPaths": ["/srv"],
        **more,
    }


def rendered(
    cluster: Kubectl, folder: Path, chart_values: dict[str, Any], name: str = RELEASE, chart: Path = CHART
) -> list[dict[str, Any]]:
    """The objects of `helm template`."""
    text = cluster.helm("template", name, str(chart), "-n", SYSTEM, "-f", write_values(folder, chart_values))
    return [document for document in yaml.safe_load_all(text) if document]


def write_values(folder: Path, chart_values: dict[str, Any]) -> str:
    path = folder / "values.yaml"
    path.write_text(json.dumps(chart_values))
    return str(path)


def previous_chart(folder: Path) -> Path:
    """The chart as an earlier release stands in for it: an older version, fewer alerts, a CRD without a field.

    There is no earlier release yet; what an upgrade must cope with is that version, CRD and defaults change.
    """
    chart = folder / "previous"
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.9", "appVersion": "0.0.9"}))
    (chart / "templates" / "prometheusrule.yaml").unlink()
    crd_file = next((chart / "files").glob("speculativeservices*.yaml"))
    crd = yaml.safe_load(crd_file.read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["paused"]
    rules = spec["x-kubernetes-validations"]
    spec["x-kubernetes-validations"] = [rule for rule in rules if "self.paused" not in rule["rule"]]
    crd_file.write_text(yaml.safe_dump(crd))
    return chart
