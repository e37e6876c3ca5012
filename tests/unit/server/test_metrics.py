"""What a Prometheus sees of a pod."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from outrider_crds.counters import TPOT_BUCKETS_S, TTFT_BUCKETS_S, ArmCounters, HistogramState, SpeedupCounters
from outrider_crds.metrics import Metric, MetricKind
from outrider_crds.runtime_state import (
    CanaryState,
    ChoiceState,
    DrafterReport,
    ProfileSource,
    ProfileState,
    RuntimeState,
    SLOClassState,
)
from outrider_runtime.server.runtime_metrics import METRICS, RuntimeStateCollector
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from setup.metrics_page import metrics_page
from tests.unit.server.runtime_states import runtime_state

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def _state() -> RuntimeState:
    tpot = [0] * (len(TPOT_BUCKETS_S) + 1)
    tpot[2], tpot[-1] = 3, 1
    return runtime_state(
        started_at=10.0,
        reported_at=20.0,
        ready=True,
        plugin_active=True,
        product="cpu",
        device='a "quoted" device',
        engine_version="0.32.0",
        profile=ProfileState(source=ProfileSource.MOUNTED, target_key="t1", error_percent=4.5, load_error="broken"),
        choice=ChoiceState(drafter="head", draft_tokens=1.5, reason="Pays", running=2),
        steps=7,
        speculative_steps=5,
        output_tokens=123,
        busy_s=1.25,
        batch_squared=14,
        batch_accepted=9,
        batch_busy_s=2.5,
        prompt_busy_s=0.75,
        proposed_tokens=30,
        draft_length_steps=[2, 5],
        drafters=[DrafterReport(name="head", loaded=True, request_steps=5, tried=9, verified=10, accepted=6)],
        slo_classes=[
            SLOClassState(
                name="interactive",
                finished=4,
                attained=3,
                output_tokens=90,
                tpot=HistogramState(counts=tpot, sum_s=5.5),
                ttft=HistogramState(counts=[0] * (len(TTFT_BUCKETS_S) + 1)),
            )
        ],
        speedup=SpeedupCounters(probes=1, baseline_tokens=4, baseline_s=0.4, speculative_tokens=8, speculative_s=0.5),
    )


def _scrape(state: RuntimeState) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(RuntimeStateCollector(lambda: state))
    text = generate_latest(registry).decode()
    own = {"outrider_service", "outrider_namespace"}
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k not in own))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_reference_of_metrics_matches_the_declarations() -> None:
    """The name and the help of a metric stand in one place: at the field of the state that it reports."""
    documented = re.findall(r"^### `(outrider_[a-z_]+)`$", DOCS.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(spec.name for spec in METRICS)
    assert DOCS.read_text() == metrics_page(DOCS.read_text()), "run `python -m setup.reference` and commit the result"


def test_every_number_of_the_state_is_a_metric() -> None:
    """A new counter that is not a metric fails here."""

    def counted(model: type[BaseModel]) -> Iterator[str]:
        for name, field in model.model_fields.items():
            if field.annotation in (int, float) and not any(isinstance(note, Metric) for note in field.metadata):
                yield f"{model.__name__}.{name}"

    models = (RuntimeState, DrafterReport, SLOClassState, SpeedupCounters, ChoiceState, ProfileState)
    assert sorted(name for model in models for name in counted(model)) == [
        "RuntimeState.reported_at",
        "RuntimeState.schema_version",
    ]


def test_descriptions_name_every_label() -> None:
    """A reader of docs/reference/metrics.md writes queries from the labels that stand there."""
    for spec in METRICS:
        for label in spec.labels:
            assert label == spec.group.label or f"`{label}`" in spec.description, (spec.name, label)
        assert spec.description, spec.name


def test_queries_in_the_docs_use_existing_metrics() -> None:
    """The operator's Prometheus source takes its queries from this page."""
    names = {spec.name for spec in METRICS}
    suffixed = {
        f"{spec.name}{suffix}" for spec in METRICS if spec.kind is MetricKind.HISTOGRAM for suffix in ("_bucket",)
    }
    used = set(re.findall(r"(outrider_[a-z_]+)\{S\}", DOCS.read_text()))
    assert used
    assert used <= names | suffixed


def test_scrape_has_the_numbers_of_the_state() -> None:
    """State and metrics are one document."""
    samples = _scrape(_state())
    assert samples["outrider_output_tokens_total", ()] == 123
    assert samples["outrider_busy_seconds_total", ()] == 1.25
    assert samples["outrider_batch_squared_total", ()] == 14
    assert samples["outrider_batch_accepted_total", ()] == 9
    assert samples["outrider_batch_busy_seconds_total", ()] == 2.5
    assert samples["outrider_prompt_busy_seconds_total", ()] == 0.75
    assert samples["outrider_drafter_tried_total", (("drafter", "head"),)] == 9
    assert samples["outrider_drafter_accepted_total", (("drafter", "head"),)] == 6
    assert samples["outrider_draft_length_request_steps_total", (("draft_tokens", "1"),)] == 5
    assert samples["outrider_slo_class_attained_total", (("slo_class", "interactive"),)] == 3
    assert samples["outrider_choice", (("reason", "Pays"),)] == 1
    assert samples["outrider_choice", (("reason", "Off"),)] == 0
    assert samples["outrider_profile_load_error", ()] == 1
    assert samples["outrider_config_error", ()] == 0


def test_histograms_are_cumulative() -> None:
    """Percentiles come from merged fixed-bucket histograms; the state's counts are per bucket."""
    samples = _scrape(_state())

    def bucket(bound: str) -> float:
        return samples["outrider_slo_class_tpot_seconds_bucket", (("le", bound), ("slo_class", "interactive"))]

    assert bucket("0.002") == 0
    assert bucket("0.003") == 3
    assert bucket("5.0") == 3
    assert bucket("+Inf") == 4
    assert samples["outrider_slo_class_tpot_seconds_sum", (("slo_class", "interactive"),)] == 5.5
    assert samples["outrider_slo_class_tpot_seconds_count", (("slo_class", "interactive"),)] == 4


def test_pod_without_figures_can_be_scraped() -> None:
    """The first scrape comes before the first request."""
    samples = _scrape(runtime_state())
    assert samples["outrider_ready", ()] == 0
    assert ("outrider_profile_error_percent", ()) not in samples


def test_scrape_of_a_canary_has_both_arms() -> None:
    """A dashboard divides tokens by price of each arm."""
    state = _state()
    assert not any(name.startswith("outrider_canary") for name, _ in _scrape(state))
    arm = ArmCounters(requests=2, tokens=30, price_s=0.5, finished={"interactive": 2}, attained={"interactive": 1})
    samples = _scrape(state.model_copy(update={"canary": CanaryState(id="a", candidate=arm)}))
    assert samples["outrider_canary_tokens_total", (("arm", "candidate"),)] == 30
    assert samples["outrider_canary_tokens_total", (("arm", "stable"),)] == 0
    assert samples["outrider_canary_price_seconds_total", (("arm", "candidate"),)] == 0.5
    labels = (("arm", "candidate"), ("slo_class", "interactive"))
    assert samples["outrider_canary_attained_total", labels] == 1
