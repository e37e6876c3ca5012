"""`kubectl outrider`: where a service stands, one screen each. It reads through kubectl, with the user's own rights."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

SERVING = "outrider.dev/component=serving,outrider.dev/service="
WHY_PATH = "/api/v1/namespaces/{namespace}/pods/{pod}:9000/proxy/outrider/why"
_GOOD, _BAD, _DIM = "32", "31", "2"
_ABNORMAL_WHEN_TRUE = frozenset({"Reconciling", "Stalled"})
_MOST_NAMED = 4  # adapters in one line
_RUNS = frozenset({"Progressing"})
"""Conditions that are neither good nor bad by their status."""

Document = Mapping[str, Any]
Paint = Callable[[str, str], str]
"""(text, colour) -> text."""


class PluginError(Exception):
    """What kubectl said, or a sentence about what is missing."""


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="kubectl outrider", description="Show the state of a SpeculativeService.")
    texts = "; ".join(f"{name}: {text}" for name, (_, text) in SCREENS.items())
    root.add_argument("command", choices=list(SCREENS), metavar="COMMAND", help=texts)
    root.add_argument("name", metavar="NAME", help="the service")
    root.add_argument("-n", "--namespace", default="", help="default: that of the context")
    root.add_argument("--context", default="", help="of the kubeconfig")
    root.add_argument("--kubeconfig", default="", help="default: KUBECONFIG, or ~/.kube/config")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        lines = SCREENS[options.command][0](Cluster(options), painter(sys.stdout, os.environ))
        print("\n".join(lines))
    except PluginError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
    return 0


class Cluster:
    """The service, its pods, and what they answer, read with kubectl."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._name: str = arguments.name
        flags = {"--context": arguments.context, "--kubeconfig": arguments.kubeconfig}
        self._connection = [f"{name}={value}" for name, value in flags.items() if value]
        self._namespace = ["-n", arguments.namespace] if arguments.namespace else []

    def service(self) -> Document:
        document: Document = json.loads(self._kubectl("get", "specsvc", self._name, *self._namespace, "-o", "json"))
        return document

    def pods(self) -> list[Document]:
        selector = f"{SERVING}{self._name}"
        documents: list[Document] = json.loads(
            self._kubectl("get", "pods", "-l", selector, *self._namespace, "-o", "json")
        )["items"]
        return documents

    def why(self, pod: Document) -> str:
        """The last decisions of `pod`, in its words."""
        metadata = pod["metadata"]
        path = WHY_PATH.format(namespace=metadata["namespace"], pod=metadata["name"])
        return self._kubectl("get", "--raw", path)

    def _kubectl(self, *arguments: str) -> str:
        command = ["kubectl", *self._connection, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise PluginError("There is no kubectl on the PATH.") from None
        if done.returncode != 0:
            raise PluginError(done.stderr.strip() or f"kubectl ended with status {done.returncode}")
        return done.stdout


def painter(stream: TextIO, environment: Mapping[str, str]) -> Paint:
    """Colours for a terminal; none into a pipe, a file, or under NO_COLOR."""
    if not stream.isatty() or environment.get("NO_COLOR"):
        return lambda text, _: text
    return lambda text, colour: f"\x1b[{colour}m{text}\x1b[0m"


def status_screen(cluster: Cluster, paint: Paint) -> list[str]:
    """Pods, figures, and each condition."""
    service = cluster.service()
    spec, status = service["spec"], service.get("status") or {}
    summary = status.get("summary") or {}
    head = [
        ("service", f"{service['metadata']['namespace']}/{service['metadata']['name']}"),
        ("target", spec["target"]["name"]),
        ("pods", f"{status.get('readyReplicas', 0)} of {spec.get('replicas', 1)} ready, "
                 f"{status.get('updatedReplicas', 0)} of the spec's revision"),
        ("image", status.get("runtimeImage", "")),
        ("goodput", summary.get("goodput", "")),
        ("speed-up", summary.get("speedup", "")),
        ("acceptance", summary.get("acceptance", "")),
        ("worst SLO", summary.get("slo", "")),
        ("adapters", _adapters_line(status.get("adapters") or ())),
        ("rollout", (status.get("rollout") or {}).get("summary", "")),
    ]  # fmt: skip
    lines = [f"{name:<11} {value}" for name, value in head if value]
    return [*lines, "", *(_condition(condition, paint) for condition in _conditions(service))]


def why_screen(cluster: Cluster, paint: Paint) -> list[str]:
    """What is not as it should be, and the last decisions of a ready pod."""
    service = cluster.service()
    wrong = [condition for condition in _conditions(service) if _is_good(condition) is False]
    lines = [_condition(condition, paint) for condition in wrong] or [paint("Nothing is wrong.", _GOOD)]
    ready = [pod for pod in cluster.pods() if _is_ready(pod)]
    if not ready:
        return [*lines, "", "No pod is ready, so none says what it decides."]
    try:
        decisions = cluster.why(ready[0]).strip()
    except PluginError as error:
        decisions = f"It does not answer (the right pods/proxy is needed): {error}"
    return [*lines, "", paint(f"Last decisions of pod {ready[0]['metadata']['name']}:", _DIM), decisions]


def drafts_screen(cluster: Cluster, paint: Paint) -> list[str]:
    """The pool, and what each drafter brings."""
    drafts = (cluster.service().get("status") or {}).get("drafts") or ()
    rows = [
        [
            entry["name"],
            _yes(entry.get("loaded")),
            _yes(entry.get("profiled")),
            _percent(entry.get("acceptanceRate", "")),
            entry.get("acceptedLength", ""),
            entry.get("sharePercent", ""),
            entry.get("reason") or entry.get("memory", ""),
        ]
        for entry in drafts
    ]
    heads = ["DRAFTER", "LOADED", "PROFILED", "ACCEPTANCE", "LENGTH", "SHARE %", "WHY NOT, OR MEMORY"]
    return _table(heads, rows, paint) if rows else ["The pool is empty, or the operator has not looked yet."]


def adapters_screen(cluster: Cluster, paint: Paint) -> list[str]:
    """The LoRA adapters, and how their requests fare."""
    rows = [
        [entry["name"], entry.get("pods", ""), _percent(entry.get("acceptanceRate", "")),
         entry.get("attainmentPercent", ""), str(entry.get("requests", 0)), entry.get("reason", "")]
        for entry in (cluster.service().get("status") or {}).get("adapters") or ()
    ]  # fmt: skip
    heads = ["ADAPTER", "PODS", "ACCEPTANCE", "SLO %", "REQUESTS", "WHY NOT"]
    return _table(heads, rows, paint) if rows else ["The service has no adapters, or the operator has not looked yet."]


def profile_screen(cluster: Cluster, paint: Paint) -> list[str]:
    """The latency profile of each product."""
    rows = [
        [entry["product"], entry.get("profiledAt", "") or "not measured", entry.get("errorPercent", ""),
         "stale" if entry.get("stale") else "", entry.get("configMap", ""), entry.get("message", "")]
        for entry in (cluster.service().get("status") or {}).get("profiles") or ()
    ]  # fmt: skip
    heads = ["PRODUCT", "MEASURED", "ERROR %", "STALE", "CONFIGMAP", "MESSAGE"]
    return _table(heads, rows, paint) if rows else ["The operator has not looked yet."]


def demand_screen(cluster: Cluster, paint: Paint) -> list[str]:
    """Pods that the load takes at the SLO, and those that there are."""
    service = cluster.service()
    rows = [
        [entry["product"], entry["replicas"], str(service["spec"].get("replicas", 1)), str(entry["requests"]),
         entry["tokensPerSecond"]]
        for entry in (service.get("status") or {}).get("demand") or ()
    ]  # fmt: skip
    if not rows:
        return [
            "The demand is not known: that takes a profile, pods that answer, and a class that the hardware can keep."
        ]
    return _table(["PRODUCT", "DEMAND", "REPLICAS", "REQUESTS A POD", "TOKENS/S A POD"], rows, paint)


SCREENS: dict[str, tuple[Callable[[Cluster, Paint], list[str]], str]] = {
    "status": (status_screen, "pods, figures, conditions"),
    "why": (why_screen, "what is wrong, and what a pod decides"),
    "drafts": (drafts_screen, "the pool: acceptance, share and memory of each drafter"),
    "adapters": (adapters_screen, "LoRA adapters: acceptance and SLO attainment"),
    "profile": (profile_screen, "latency profiles"),
    "demand": (demand_screen, "replicas that the load takes at the SLO"),
}


def _conditions(service: Document) -> list[Document]:
    conditions: list[Document] = (service.get("status") or {}).get("conditions") or []
    return conditions


def _adapters_line(adapters: Sequence[Document]) -> str:
    """Count of the adapters that every ready pod serves, and names of the others; empty without adapters."""
    if not adapters:
        return ""
    missing = [f"{entry['name']} ({entry.get('pods', '')})" for entry in adapters if not entry.get("loaded")]
    named = ", ".join(missing[:_MOST_NAMED]) + (" and others" if len(missing) > _MOST_NAMED else "")
    line = f"{len(adapters) - len(missing)} of {len(adapters)} loaded"
    return f"{line}; not {named}" if missing else line


def _is_good(condition: Document) -> bool | None:
    """None where its status is neither good nor bad."""
    if condition["type"] in _RUNS or condition["status"] == "Unknown" or condition["type"] == "SpeculationActive":
        return None
    return bool((condition["status"] == "True") is (condition["type"] not in _ABNORMAL_WHEN_TRUE))


def _condition(condition: Document, paint: Paint) -> str:
    colours = {True: _GOOD, False: _BAD, None: _DIM}
    mark = paint(f"{condition['status']:<7}", colours[_is_good(condition)])
    return f"{condition['type']:<17} {mark} {condition['reason']:<18} {condition.get('message', '')}".rstrip()


def _is_ready(pod: Document) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _percent(rate: str) -> str:
    return f"{100 * float(rate):.3g}%" if rate else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], paint: Paint) -> list[str]:
    texts = [[*row] for row in rows]
    widths = [max(len(row[column]) for row in (list(heads), *texts)) for column in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()

    return [paint(line(heads), _DIM), *(line(row) for row in texts)]


if __name__ == "__main__":
    sys.exit(main())
