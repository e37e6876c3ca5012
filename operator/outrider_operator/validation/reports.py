"""Validate what tenants' processes report: states of pods, results of profiling Jobs, series in Prometheus.

A tenant's image wrote it, so it may be anything. Of a series only the label `namespace` can be trusted: Prometheus sets
it at the scrape, and overwrites one that a pod exports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from outrider_crds.prefetch_report import PrefetchProgress
from outrider_crds.profile import TERMINATION_MESSAGE_LIMIT, ProfilingResult
from outrider_crds.runtime_state import RuntimeState
from outrider_crds.texts import cut
from pydantic import ValidationError
from pydantic_core import from_json

from outrider_operator.cluster_model import Object
from outrider_operator.validation.reading import InvalidInput, ended, integer, text

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
REFUSED = "HTTP status"
"""Beginning of what is said of a pod that answers without a state, unlike one that does not answer."""
_STATE = "state"
PROFILER = "profiler"
"""Name of the container in a profiling pod."""
_MOST_REASON = 256
_RESULT = "result"
SCRAPED_NAMESPACE, CLAIMED_NAMESPACE, SERVICE = "namespace", "outrider_namespace", "outrider_service"
SERVICE_LABELS = (SCRAPED_NAMESPACE, CLAIMED_NAMESPACE, SERVICE)


def runtime_state(body: bytes) -> RuntimeState | InvalidInput:
    """The state in `body` with texts and lists cut and unknown fields dropped; InvalidInput if it is not a state."""
    if len(body) > MOST_BYTES:
        return InvalidInput(_STATE, "TooLarge", f"more than {MOST_BYTES} bytes")
    try:
        return RuntimeState.model_validate(_bounded(from_json(body, allow_inf_nan=False)), extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return InvalidInput(_STATE, "NotAState", cut(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))
    except ValueError as error:
        return InvalidInput(_STATE, "NotAState", cut(str(error)))


def refusal(status: int, body: bytes) -> str:
    """What a pod that answers without a state says: the status, and the reason if it names one."""
    try:
        said = text(from_json(body), "error") if len(body) <= MOST_BYTES else ""
    except ValueError:
        said = ""
    return f"{REFUSED} {status}: {cut(said, _MOST_REASON)}" if said else f"{REFUSED} {status}"


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


@dataclass(frozen=True)
class Termination:
    """End of the container in a profiling pod."""

    result: ProfilingResult | InvalidInput
    exit_code: int
    reason: str
    message: str
    """Termination message of the container, cut to a limit."""


def termination_of(pod: Object | None) -> Termination | None:
    """End of the pod's container; None while it runs, or if there is none."""
    if not (end := ended(pod, PROFILER)):
        return None
    message = text(end, "message")[:TERMINATION_MESSAGE_LIMIT]
    reason = text(end, "reason")[:_MOST_REASON]
    return Termination(profiling_result(message), integer(end, "exitCode"), reason, message)


def profiling_result(message: str) -> ProfilingResult | InvalidInput:
    """The result in a termination message; InvalidInput if it has none."""
    try:
        return ProfilingResult.read(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return InvalidInput(_RESULT, "NotAResult", f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:_MOST_REASON])


@dataclass(frozen=True)
class Series:
    """One series of an instant vector that belongs to a service."""

    namespace: str
    service: str
    labels: Mapping[str, str]
    value: float


def read_series(vector: Iterable[Mapping[str, Any]], needs: Iterable[str] = ()) -> Iterator[Series]:
    """The series that have a service's labels, the labels in `needs`, and a value that a counter can have.

    Others are left out, so that a faulty pod does not spoil the figures of other pods. So are series of a pod that
    claims to belong to a service of another namespace.
    """
    for sample in vector:
        labels, value = sample.get("metric") or {}, _counted(sample.get("value"))
        if value is None or not all(labels.get(name) for name in (*SERVICE_LABELS, *needs)):
            continue
        if labels[SCRAPED_NAMESPACE] == labels[CLAIMED_NAMESPACE]:
            yield Series(labels[SCRAPED_NAMESPACE], labels[SERVICE], labels, value)


def bucket(text: str) -> float | None:
    """Upper bound in a histogram's label `le`; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def _counted(pair: Any) -> float | None:
    """Value of a (time, text) pair; None if a counter cannot have it."""
    try:
        value = float(pair[1])
    except (TypeError, ValueError, LookupError):
        return None
    return round(value, LEAST_DIGITS) if 0 <= value <= MOST_COUNT else None
