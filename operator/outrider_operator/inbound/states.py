"""What a pod answers on its state endpoint. A pod runs a tenant's image: it may answer anything."""

from __future__ import annotations

from typing import Any

from outrider_crds.spec import MOST_DRAFT_TOKENS, MOST_DRAFTERS, MOST_SLO_CLASSES
from outrider_crds.state import TPOT_BUCKETS_S, TTFT_BUCKETS_S, Histogram, RuntimeState, SLOClassState
from pydantic import ValidationError
from pydantic_core import from_json

from outrider_operator.inbound.unfit import Unfit

MOST_BYTES = 64 * 1024
"""Of a state: eight classes and eight drafters, as many as a service may have, take some 10 KiB."""
MOST_COUNT = 10**15
"""Of any number in it: 30 years of a million tokens a second. Sums over pods stay within the status' 64 bits."""
MOST_TEXT = 1024
MOST_ITEMS = 32
"""Of any list in it, before it is validated: each item that does not fit costs three errors. Histograms have 28."""
LEAST_DIGITS = 9
"""Decimals that are kept of a number: nanoseconds. Below that a divisor is 0, not a reason for an absurd quotient."""
_SOURCE = "state"


def runtime_state(body: bytes) -> RuntimeState | Unfit:
    """The state in `body`: texts and lists cut, unknown fields left out; Unfit for anything that is no state."""
    if len(body) > MOST_BYTES:
        return Unfit(_SOURCE, "TooLarge", f"more than {MOST_BYTES} bytes")
    try:
        return _cut(RuntimeState.model_validate(_bounded(from_json(body, allow_inf_nan=False)), extra="ignore"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return Unfit(_SOURCE, "NotAState", f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:MOST_TEXT])
    except ValueError as error:
        return Unfit(_SOURCE, "NotAState", str(error)[:MOST_TEXT])


def _cut(state: RuntimeState) -> RuntimeState:
    """`state` with its lists no longer than a service within the CRD's bounds makes them."""
    lists = {
        "drafters": state.drafters[: 2 * MOST_DRAFTERS],  # a canary pod hosts two pools
        "slo_classes": [_cut_class(slo) for slo in state.slo_classes[:MOST_SLO_CLASSES]],
        "draft_length_steps": state.draft_length_steps[: MOST_DRAFT_TOKENS + 1],
    }
    return state.model_copy(update=lists)


def _cut_class(slo: SLOClassState) -> SLOClassState:
    tpot, ttft = _cut_histogram(slo.tpot, TPOT_BUCKETS_S), _cut_histogram(slo.ttft, TTFT_BUCKETS_S)
    return slo.model_copy(update={"tpot": tpot, "ttft": ttft})


def _cut_histogram(histogram: Histogram, bounds: tuple[float, ...]) -> Histogram:
    return histogram.model_copy(update={"counts": histogram.counts[: len(bounds) + 1]})


def _bounded(value: Any) -> Any:
    """`value` with its texts and lists cut. Raises ValueError for a number that no counter can reach."""
    if isinstance(value, dict):
        return {key: _bounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_bounded(each) for each in value[:MOST_ITEMS]]
    if isinstance(value, str):
        return value[:MOST_TEXT]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    return value


def _number(value: float) -> float:
    if not 0 <= value <= MOST_COUNT:
        raise ValueError("a number is below 0 or above 10^15")
    return round(value, LEAST_DIGITS) if isinstance(value, float) else value
