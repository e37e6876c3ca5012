"""Read the result of a profiling Job from its pod's termination message, which a tenant's image wrote."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.profile import TERMINATION_MESSAGE_LIMIT, ProfilingResult
from pydantic import ValidationError

from outrider_operator.cluster_model import Object
from outrider_operator.validation.invalid_input import InvalidInput
from outrider_operator.validation.reading import ended, integer, text

PROFILER = "profiler"
"""Name of the container in a profiling pod."""
_MOST_REASON = 256
_SOURCE = "result"


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
        return InvalidInput(_SOURCE, "NotAResult", f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:_MOST_REASON])
