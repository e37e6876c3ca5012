"""`kubectl outrider`: where a service stands, one screen each. It reads through kubectl, with the user's own rights."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from subprocess import PIPE, STDOUT, Popen
from typing import Any, TextIO

WHY_PATH = "/api/v1/namespaces/{namespace}/pods/{pod}/proxy/outrider/why"
_GOOD, _BAD, _DIM = "32", "31", "2"
_ABNORMAL_WHEN_TRUE = frozenset({"Reconciling", "Stalled"})
_MOST_NAMED = 4  # adapters in one line
_MOST_LETTERS = 1 << 20  # of a pod's answer, which may have no end
_OLD = timedelta(minutes=5)  # under traffic the operator writes figures every 15 seconds
_NEUTRAL = frozenset({"Progressing", "SpeculationActive"})  # neither good nor bad by their status

Document = Mapping[str, Any]
Paint = Callable[[str, str], str]  # (text, colour) -> text


class PluginError(Exception):
    """What kubectl said, or a sentence about what is missing; empty where kubectl has said it itself."""


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="kubectl outrider", description="Show the state of a SpeculativeService.")
    texts = "; ".join(f"{name}: {text}" for name, (_, text) in SCREENS.items())
    root.add_argument("command", choices=list(SCREENS), metavar="COMMAND", help=texts)
    root.add_argument("name", metavar="NAME", help="the service")
    root.add_argument("-n", "--namespace", default="", help="default: that of the context")
    root.add_argument("--context", default="", help="context of the kubeconfig (default: the current one)")
    root.add_argument("--kubeconfig", default="", help="default: KUBECONFIG, or ~/.kube/config")
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    cluster, paint = Cluster(options), painter(sys.stdout, os.environ)
    try:
        service = cluster.service()
        lines = [*_age_lines(service, paint), *SCREENS[options.command][0](cluster, service, paint)]
        print("\n".join(lines), flush=True)
    except PluginError as error:
        print(error, end="\n" if str(error) else "", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head`: what is left in the buffer would raise it again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _printable(document: Any) -> Any:
    """`document` without control characters: a pod writes texts that a terminal would obey."""
    if isinstance(document, str):
        return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in document)
    if isinstance(document, list):
        return [_printable(item) for item in document]
    if isinstance(document, dict):
        return {_printable(key): _printable(item) for key, item in document.items()}
    return document


class Cluster:
    """The service, its pods, and what they answer, read with kubectl."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._name: str = arguments.name
        flags = {"--context": arguments.context, "--kubeconfig": arguments.kubeconfig}
        self._connection = [f"{name}={value}" for name, value in flags.items() if value]
        self._namespace = ["-n", arguments.namespace] if arguments.namespace else []

    def service(self) -> Document:
        return dict(self._document("specsvc", self._name, "--show-managed-fields"))

    def pods(self, service: Document) -> list[Document]:
        selector = _status(service).get("selector")
        return list(self._document("pods", "-l", selector)["items"]) if selector else []

    def why(self, service: Document, pod: Document) -> list[str]:
        """The last decisions of `pod`, in its words."""
        existing, metadata = (service["spec"].get("workload") or {}).get("existing") or {"port": 9000}, pod["metadata"]
        name = f"{'https:' * (existing.get('scheme') == 'HTTPS')}{metadata['name']}:{existing['port']}"
        path = WHY_PATH.format(namespace=metadata["namespace"], pod=name)
        text = self._kubectl("get", "--raw", path, "--request-timeout=10s", most=_MOST_LETTERS)
        return [_printable(line) for line in text.strip().splitlines()]

    def _document(self, *arguments: str) -> Any:
        return _printable(json.loads(self._kubectl("get", *arguments, *self._namespace, "-o", "json")))

    def _kubectl(self, *arguments: str, most: int = -1) -> str:
        """Output of kubectl, which asks and complains on the terminal itself (a login). With `most`, it is cut after so
        many letters and has the complaints in it: a pipe of their own could fill while nothing reads it."""
        command, errors = ["kubectl", *self._connection, *arguments], STDOUT if most > 0 else None
        try:
            with Popen(command, stdout=PIPE, stderr=errors, encoding="utf-8", errors="replace") as process:
                output = process.stdout.read(most) if process.stdout is not None else ""
                if len(output) == most:
                    process.kill()
        except FileNotFoundError:
            raise PluginError("There is no kubectl on the PATH.") from None
        if process.returncode != 0 and len(output) != most:
            raise PluginError(_printable(output.strip()) if most > 0 else "")
        return output


def painter(stream: TextIO, environment: Mapping[str, str]) -> Paint:
    """Colours for a terminal; none into a pipe, a file, or under NO_COLOR."""
    if not stream.isatty() or environment.get("NO_COLOR"):
        return lambda text, _: text
    return lambda text, colour: f"\x1b[{colour}m{text}\x1b[0m"


def status_screen(_: Cluster, service: Document, paint: Paint) -> list[str]:
    """Pods, figures, and each condition."""
    spec, status = service["spec"], _status(service)
    summary = status.get("summary") or {}
    total = f"selected: {status.get('replicas', 0)}" if "workload" in spec else f"spec: {spec.get('replicas', 1)}"
    head = [
        ("service", f"{service['metadata']['namespace']}/{service['metadata']['name']}"),
        ("target", spec["target"]["name"]),
        ("pods", f"{status.get('readyReplicas', 0)} ready ({total}), "
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


def why_screen(cluster: Cluster, service: Document, paint: Paint) -> list[str]:
    """What is not as it should be or not known, and the last decisions of a ready pod."""
    conditions = _conditions(service)
    lines = [_condition(condition, paint) for condition in conditions if _is_good(condition) is False]
    if not lines and _is_ready(service) and _unseen(service) is None:
        lines = [paint("Nothing is wrong.", _GOOD)]
    lines += [_condition(condition, paint) for condition in conditions if condition["status"] == "Unknown"]
    ready = [pod for pod in cluster.pods(service) if _is_ready(pod)]
    if not ready:
        return [*lines, "", "No pod is ready, so none says what it decides."]
    try:
        decisions = cluster.why(service, ready[0])
    except PluginError as error:
        decisions = [f"It does not answer (you need the right `get` on pods/proxy): {error}"]
    return [*lines, "", paint(f"Last decisions of pod {ready[0]['metadata']['name']}:", _DIM), *decisions]


def drafts_screen(_: Cluster, service: Document, paint: Paint) -> list[str]:
    """The pool, and what each drafter brings."""
    drafts = _status(service).get("drafts") or ()
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
    return _table(heads, rows, paint) if rows else ["The pool is empty."]


def adapters_screen(_: Cluster, service: Document, paint: Paint) -> list[str]:
    """The LoRA adapters, and how their requests fare."""
    rows = [
        [entry["name"], entry.get("pods", ""), _percent(entry.get("acceptanceRate", "")),
         entry.get("attainmentPercent", ""), str(entry.get("requests", 0)), entry.get("reason", "")]
        for entry in _status(service).get("adapters") or ()
    ]  # fmt: skip
    heads = ["ADAPTER", "PODS", "ACCEPTANCE", "SLO %", "REQUESTS", "WHY NOT"]
    return _table(heads, rows, paint) if rows else ["The service has no adapters."]


def profile_screen(_: Cluster, service: Document, paint: Paint) -> list[str]:
    """The latency profile of each product."""
    rows = [
        [entry["product"], entry.get("profiledAt", "") or "not measured", entry.get("errorPercent", ""),
         "stale" if entry.get("stale") else "", entry.get("configMap", ""), entry.get("message", "")]
        for entry in _status(service).get("profiles") or ()
    ]  # fmt: skip
    heads = ["PRODUCT", "MEASURED", "ERROR %", "STALE", "CONFIGMAP", "MESSAGE"]
    return _table(heads, rows, paint) if rows else ["No profile is known."]


def demand_screen(_: Cluster, service: Document, paint: Paint) -> list[str]:
    """Pods that the load takes at the SLO, and those that there are."""
    rows = [
        [entry["product"], entry["replicas"], str(service["spec"].get("replicas", 1)), str(entry["requests"]),
         entry["tokensPerSecond"]]
        for entry in _status(service).get("demand") or ()
    ]  # fmt: skip
    if not rows:
        return [
            "The demand is not known: that takes a profile, pods that answer, and a class that the hardware can keep."
        ]
    return _table(["PRODUCT", "DEMAND", "REPLICAS", "REQUESTS A POD", "TOKENS/S A POD"], rows, paint)


SCREENS: dict[str, tuple[Callable[[Cluster, Document, Paint], list[str]], str]] = {
    "status": (status_screen, "pods, figures, conditions"),
    "why": (why_screen, "what is wrong, and what a pod decides"),
    "drafts": (drafts_screen, "the pool: acceptance, share and memory of each drafter"),
    "adapters": (adapters_screen, "LoRA adapters: acceptance and SLO attainment"),
    "profile": (profile_screen, "latency profiles"),
    "demand": (demand_screen, "replicas that the load takes at the SLO"),
}


def _status(document: Document) -> Document:
    return document.get("status") or {}


def _conditions(document: Document) -> list[Document]:
    return _status(document).get("conditions") or []


def _unseen(service: Document) -> str | None:
    """A sentence if the status speaks of no generation, or of an older one than the spec's; None if it is current."""
    seen, generation = _status(service).get("observedGeneration", -1), service["metadata"].get("generation")
    if seen == generation:
        return None
    if seen < 1:
        return "The operator has not looked at this service yet."
    return f"The operator has not looked at generation {generation} yet; this is of generation {seen}."


def _age_lines(service: Document, paint: Paint) -> list[str]:
    """What to know about the status before reading it: that it is of another spec, and its age where it is old."""
    fields = service["metadata"].get("managedFields") or []
    times = [entry.get("time") for entry in fields if entry.get("subresource") == "status"]
    written = [datetime.fromisoformat(time) for time in times if time]
    age = datetime.now(UTC) - max(written) if written else timedelta()
    unseen = _unseen(service)
    old = f"The status was last written {_duration(age)} ago." if age > _OLD or (unseen and age) else None
    lines = [paint(text, _BAD if text == unseen else _DIM) for text in (unseen, old) if text]
    return [*lines, ""] if lines else []


def _duration(age: timedelta) -> str:
    minutes = int(age.total_seconds()) // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} d"


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
    if condition["type"] in _NEUTRAL or condition["status"] == "Unknown":
        return None
    return bool((condition["status"] == "True") is (condition["type"] not in _ABNORMAL_WHEN_TRUE))


def _condition(condition: Document, paint: Paint) -> str:
    colours = {True: _GOOD, False: _BAD, None: _DIM}
    mark = paint(f"{condition['status']:<7}", colours[_is_good(condition)])
    return f"{condition['type']:<17} {mark} {condition['reason']:<18} {condition.get('message', '')}".rstrip()


def _is_ready(document: Document) -> bool:
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in _conditions(document))


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
