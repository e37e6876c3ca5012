"""Validate a pod's answer on its state endpoint. A tenant's image answers, so it may be anything."""

from __future__ import annotations

from itertools import islice
from typing import Any

from outrider_crds.prefetch_report import PrefetchProgress
from outrider_crds.runtime_state import RuntimeState
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
MOST_FIELDS = 64
"""Fields of an object: a state has 36, and a later release may add some."""
LEAST_DIGITS = 9
"""Decimals of a number (nanoseconds). Smaller numbers become 0, so that a quotient by them is not absurd."""
_SOURCE = "state"


def runtime_state(body: bytes) -> RuntimeState | InvalidInput:
    """The state in `body` with texts and lists cut and unknown fields dropped; InvalidInput if it is not a state."""
    if len(body) > MOST_BYTES:
        return InvalidInput(_SOURCE, "TooLarge", f"more than {MOST_BYTES} bytes")
    try:
        return RuntimeState.model_validate(_bounded(from_json(body, allow_inf_nan=False)), extra="ignore")
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


def _bounded(value: Any) -> Any:
    """`value` with lists and objects cut. Raises ValueError for a number that a counter cannot have."""
    if isinstance(value, dict):
        return {key: _bounded(item) for key, item in islice(value.items(), MOST_FIELDS)}
    if isinstance(value, list):
        return [_bounded(item) for item in value[:MOST_ITEMS]]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    return value


def _number(value: float) -> float:
    if not 0 <= value <= MOST_COUNT:
        raise ValueError("a number is below 0 or above 10^15")
    return round(value, LEAST_DIGITS) if isinstance(value, float) else value
