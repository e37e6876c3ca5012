"""The chart's Grafana dashboards: each query reads what is exported, and a real Prometheus answers it."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider_crds.runtime_config import boot_config, hot_config
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_operator.operator_metrics import status_metrics, telemetry
from outrider_runtime.server.runtime_metrics import METRICS, RuntimeStateCollector
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from setup import system
from tests.operator import manifests
from tests.operator.chart.release import CHART
from tests.operator.client import PATIENCE_S
from tests.operator.standin.state import Behaviour, runtime_state
from tests.operator.stored_prometheus import stored_prometheus

pytestmark = pytest.mark.cluster  # Prometheus' binaries come with the cluster's

FOLDER = CHART / "files" / "dashboards"
VARIABLES = {"$__rate_interval": "1m", "$namespace": "ns", "$service": "chat"}
SUFFIXES = re.compile(r"_(bucket|count|sum)$")
OF_THE_ENGINE = re.compile(r"\bvllm:\w+")
SCRAPE_EVERY_S, SCRAPES = 15, 40


def _dashboards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def _queries() -> Iterator[tuple[str, str]]:
    """(dashboard: panel, query with its variables filled in)."""
    for name, dashboard in _dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for variable, value in VARIABLES.items():
                    query = query.replace(variable, value)
                yield f"{name}: {panel['title']}", query


def _exported() -> dict[str, set[str]]:
    """Metric -> its labels."""
    service = {"outrider_namespace", "outrider_service"}
    pods = {metric.name: {*service, *metric.labels, metric.group.label} for metric in METRICS}
    own = {
        f"{metric._name}{'_total' if metric._type == 'counter' else ''}": set(metric._labelnames)
        for metric in vars(telemetry).values()
        if isinstance(metric, MetricWrapperBase)
    }
    services = {
        status_metrics.CONDITION: set(status_metrics.CONDITION_LABELS),
        status_metrics.DEMAND: set(status_metrics.DEMAND_LABELS),
    }
    return {**pods, **own, **services}


def test_dashboards_read_only_what_is_exported() -> None:
    """A panel of a metric that was renamed is empty for ever, and looks like a quiet service."""
    exported = _exported()
    for panel, query in _queries():
        for name in re.findall(r"\boutrider_(?!namespace\b|service\b)\w+", query):
            assert SUFFIXES.sub("", name) in exported, panel
        for name, matchers in re.findall(r"\b(outrider_\w+)\{([^}]*)\}", query):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert labels <= exported[SUFFIXES.sub("", name)], panel


def test_dashboards_are_distinct_and_their_panels_do_not_overlap() -> None:
    dashboards = _dashboards()
    assert {"service", "fleet", "operator"} == set(dashboards)
    assert len({dashboard["uid"] for dashboard in dashboards.values()}) == 3
    for dashboard in dashboards.values():
        cells = [(x, y) for panel in dashboard["panels"] for place in [panel["gridPos"]]
                 for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])]  # fmt: skip
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": query} for number, (_, query) in enumerate(_queries())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool = system.prometheus().parent / "promtool"
    checked = subprocess.run([promtool, "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[[str], list[Any]], None, None]:
    """Answers queries as of the last scrape: a Prometheus that scraped a pod and the operator for ten minutes."""
    end = time.time()
    with stored_prometheus(tmp_path_factory.mktemp("dashboards"), _scrapes(end)) as address:
        yield partial(_answer, address, end)


@pytest.fixture(scope="module")
def answer_twice(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[[str], list[Any]], None, None]:
    """Answers like `answer` where two jobs scrape pod and operator: a PodMonitor's and one by annotations."""
    end = time.time()
    with stored_prometheus(tmp_path_factory.mktemp("twice"), _scrapes(end, "monitor", "annotations")) as address:
        yield partial(_answer, address, end)


def test_every_panel_of_a_busy_service_shows_something(answer: Callable[[str], list[Any]]) -> None:
    """Metrics of a pod, as its exporter writes them, and of the operator; what the engine exports is not here."""
    empty = [panel for panel, query in _queries() if not OF_THE_ENGINE.search(query) and not answer(query)]
    assert sorted(set(empty)) == []


def test_pod_that_two_jobs_scrape_counts_once(
    answer: Callable[[str], list[Any]], answer_twice: Callable[[str], list[Any]]
) -> None:
    """Bug: goodput, pods and requests of a service were doubled, and the panel of products an error."""
    sums = [
        query for _, query in _queries() if re.search(r"\b(sum|count)\b", query) and not OF_THE_ENGINE.search(query)
    ]
    assert sums
    for query in sums:
        once, twice = ({str(s["metric"]): float(s["value"][1]) for s in ask(query)} for ask in (answer, answer_twice))
        assert twice == pytest.approx(once, rel=0.01), query


def test_documented_form_counts_a_pod_once_without_its_label(
    answer: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    """A job that sets no label pod makes the short form count its pods twice, which the page says."""
    page = (CHART.parents[1] / "docs/reference/metrics.md").read_text()
    service = 'outrider_service="chat",outrider_namespace="ns"'
    (form,) = (
        block.replace("{S,", f"{{{service},").replace("[W]", "[1m]")
        for block in re.findall(r"(?m)(?:^ {4}.*\n)+", page)
        if "instance" in block
    )
    end = time.time()
    scrapes = [*_scrapes(end), *(line.replace(',pod="chat-0"', "") for line in _scrapes(end, "annotations"))]
    with stored_prometheus(tmp_path, scrapes) as address:
        (mixed,) = _answer(address, end, form)
        (short,) = _answer(
            address, end, f"sum(max by (pod, instance) (rate(outrider_output_tokens_total{{{service}}}[1m])))"
        )
    (once,) = answer(form)
    assert float(mixed["value"][1]) == pytest.approx(float(once["value"][1]), rel=0.01)
    assert float(short["value"][1]) == pytest.approx(2 * float(once["value"][1]), rel=0.01)


def _scrapes(end: float, *jobs: str) -> Iterator[str]:
    """Pages of the pod and the operator, every 15 s until now, as lines with their times."""
    for number in range(SCRAPES + 1):
        elapsed_s = number * SCRAPE_EVERY_S
        moment = end - (SCRAPES - number) * SCRAPE_EVERY_S
        for line in _page(elapsed_s).splitlines():
            for job in jobs or ("monitor",):
                if line and not line.startswith("#"):
                    scraped = line.replace("{", f'{{job="{job}",instance="10.0.0.1:9000",', 1).replace(",}", "}", 1)
                    yield f"{scraped} {moment:.3f}"


def _page(elapsed_s: float) -> str:
    registry = CollectorRegistry()
    state = _state(elapsed_s)
    registry.register(RuntimeStateCollector(lambda: state))
    registry.register(status_metrics.ServiceStatusMetrics(lambda: [_service()]))
    pages = generate_latest(registry).decode()
    return re.sub(r"(?m)^(\w+)\{", r'\1{namespace="ns",pod="chat-0",', pages) + _operator_page(elapsed_s)


def _operator_page(elapsed_s: float) -> str:
    """Every metric of the operator, one series each; counters grow."""
    lines = []
    for metric in vars(telemetry).values():
        if isinstance(metric, MetricWrapperBase):
            labels = ",".join(f'{name}="x"' for name in metric._labelnames)
            names = {"counter": ["_total"], "gauge": [""], "histogram": []}[metric._type or "gauge"]
            lines += [f"{metric._name}{suffix}{{{labels}}} {1 + elapsed_s}" for suffix in names]
            if metric._type == "histogram":
                lines += [f'{metric._name}_bucket{{le="{bound}"}} {1 + elapsed_s}' for bound in ("0.5", "+Inf")]
    return "\n".join(lines)


def _state(elapsed_s: float) -> RuntimeState:
    adapters = [{"name": "support", "source": {"hub": {"repository": "acme/support"}}}]
    document = manifests.service("chat", "ns", engine={"lora": {}}, adapters=adapters)
    spec = SpeculativeServiceSpec.model_validate(document["spec"])
    boot = boot_config(spec, service="chat", namespace="ns", revision="a", image="i", max_draft_tokens=4)
    return runtime_state(
        boot, hot_config(spec, [boot.draft_pool]), Behaviour(tokens_per_s=100.0),
        started_at=time.time() - elapsed_s, ready=True, product="cpu", profiled=True, streamed_tokens=0,
    )  # fmt: skip


def _service() -> dict[str, Any]:
    """A service with a condition of each kind that a panel looks for."""
    kinds = {"Stalled": "True", "Ready": "False", "Updated": "False", "SLOAttained": "False", "GoodputHealthy": "False"}
    conditions = [
        {"type": kind, "status": status, "reason": "X", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind, status in kinds.items()
    ]
    demand = [{"product": "cpu", "replicas": "1.5", "requests": 8, "tokensPerSecond": "200"}]
    metadata = {"namespace": "ns", "name": "chat"}
    return {"metadata": metadata, "spec": {}, "status": {"conditions": conditions, "demand": demand}}


def _answer(address: str, at: float, query: str) -> list[Any]:
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query, 'time': f'{at:.3f}'})}"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        result: list[Any] = json.load(response)["data"]["result"]
    return [series for series in result if series["value"][1] != "NaN"]
