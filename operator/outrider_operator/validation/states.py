"""Validate a pod's answer on its state endpoint. A tenant's image answers, so it may be anything."""

from __future__ import annotations

from itertools import islice
from typing import Any

from outrider_crds.counters import TPOT_BUCKETS_S, TTFT_BUCKETS_S, HistogramState
from outrider_crds.draft_pool import MOST_DRAFT_TOKENS
from outrider_crds.lora_adapters import MOST_ADAPTERS
from outrider_crds.prefetch_report import PrefetchProgress
from outrider_crds.runtime_state import AdapterState, RuntimeState, SLOClassState
from outrider_crds.spec import MOST_DRAFTERS, MOST_SLO_CLASSES
from outrider_crds.texts import cut
from pydantic import ValidationError
from pydantic_core import from_json

from outrider_operator.validation.invalid_input import InvalidInput

MOST_BYTES = 64 * 1024
"""Bytes of a state. Eight SLO classes and eight drafters, the limits of a service, take some 10 KiB, and 32 adapters
with the longest names and reasons 40 KiB."""
MOST_COUNT = 10**15
"""Largest number in a state: 30 years of a million tokens per second. Sums over pods fit into 64 bits."""
MOST_ITEMS = 32
"""Items of a list before validation, since each wrong item costs three errors. Histograms have 28, and a service may
have 32 adapters."""
LEAST_DIGITS = 9
"""Decimals of a number (nanoseconds). Smaller numbers become 0, so that a quotient by them is not absurd."""
_SOURCE = "state"


def runtime_state(body: bytes) -> RuntimeState | InvalidInput:
    """The state in `body` with texts and lists cut and unknown fields dropped; InvalidInput if it is not a state."""
    if len(body) > MOST_BYTES:
        return InvalidInput(_SOURCE, "TooLarge", f"more than {MOST_BYTES} bytes")
    try:
        return _cut(RuntimeState.model_validate(_bounded(from_json(body, allow_inf_nan=False)), extra="ignore"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return InvalidInput(_SOURCE, "NotAState", cut(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))
    except ValueError as error:
        return InvalidInput(_SOURCE, "NotAState", cut(str(error)))


def prefetch_progress(body: bytes) -> PrefetchProgress | None:
    """The progress in `body`; None for anything else."""
    try:
        return PrefetchProgress.read(body) if len(body) <= MOST_BYTES else None
    except ValidationError:
        return None


def _cut(state: RuntimeState) -> RuntimeState:
    """`state` with lists cut to the length that the CRD's limits allow."""
    lists = {
        "drafters": state.drafters[: 2 * MOST_DRAFTERS],  # a canary pod hosts two pools
        "slo_classes": [_cut_class(slo) for slo in state.slo_classes[:MOST_SLO_CLASSES]],
        "adapters": [_cut_adapter(adapter) for adapter in state.adapters[:MOST_ADAPTERS]],
        "draft_length_steps": state.draft_length_steps[: MOST_DRAFT_TOKENS + 1],
    }
    return state.model_copy(update=lists)


def _cut_adapter(adapter: AdapterState) -> AdapterState:
    """`adapter` with as many SLO classes as a service may have."""
    counts = {"finished": adapter.finished, "attained": adapter.attained}
    few = {name: dict(islice(by_class.items(), MOST_SLO_CLASSES)) for name, by_class in counts.items()}
    return adapter.model_copy(update=few)


def _cut_class(slo: SLOClassState) -> SLOClassState:
    tpot, ttft = _cut_histogram(slo.tpot, TPOT_BUCKETS_S), _cut_histogram(slo.ttft, TTFT_BUCKETS_S)
    return slo.model_copy(update={"tpot": tpot, "ttft": ttft})


def _cut_histogram(histogram: HistogramState, bounds: tuple[float, ...]) -> HistogramState:
    return histogram.model_copy(update={"counts": histogram.counts[: len(bounds) + 1]})


def _bounded(value: Any) -> Any:
    """`value` with lists cut. Raises ValueError for a number that a counter cannot have."""
    if isinstance(value, dict):
        return {key: _bounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_bounded(item) for item in value[:MOST_ITEMS]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    return value


def _number(value: float) -> float:
    if not 0 <= value <= MOST_COUNT:
        raise ValueError("a number is below 0 or above 10^15")
    return round(value, LEAST_DIGITS) if isinstance(value, float) else value
