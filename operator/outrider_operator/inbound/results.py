"""What a profiling Job's pod leaves behind. It runs a tenant's image: its last words may be anything."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.profile import TERMINATION_MESSAGE_LIMIT, ProfilingResult
from pydantic import ValidationError

from outrider_operator.inbound.reading import integer, items, mapping, text
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.model import Object

PROFILER = "profiler"
"""Name of the container that measures."""
_MOST_REASON = 256
_SOURCE = "result"


@dataclass(frozen=True)
class LastWords:
    """The end of the container that measures."""

    result: ProfilingResult | Unfit
    exit_code: int
    reason: str
    message: str
    """As the container left it, bounded."""


def last_words(pod: Object | None) -> LastWords | None:
    """None while the container runs, or where there is none."""
    statuses = items(pod, "status", "containerStatuses")
    profiler: Object = next((each for each in statuses if each.get("name") == PROFILER), {})
    ended = mapping(profiler, "state", "terminated")
    if not ended:
        return None
    message = text(ended, "message")[:TERMINATION_MESSAGE_LIMIT]
    reason = text(ended, "reason")[:_MOST_REASON]
    return LastWords(profiling_result(message), integer(ended, "exitCode"), reason, message)


def profiling_result(message: str) -> ProfilingResult | Unfit:
    """The result in a termination message; Unfit for anything that is none."""
    try:
        return ProfilingResult.read(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return Unfit(_SOURCE, "NotAResult", f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:_MOST_REASON])
