"""Compute the figures of a window from the pods' counters. Restarts of pods lose no counts.

The counters of a pod grow from the start of its process. `record` adds their growth since the last snapshot to totals
of the service, and keeps totals over time. A window is the difference of two snapshots.

Drafter counters come from pods of one revision only: in the next revision a name may stand for another draft.
"""

from __future__ import annotations

from collections import Counter as TallyOf
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from outrider_crds.runtime_state import RuntimeState, ServiceCounters

from outrider_operator.cluster_model import Object
from outrider_operator.figure_windows import FigureWindows, WindowCounts
from outrider_operator.validation.reading import items, text

Names = Mapping[str, frozenset[str]]
"""Field of `ServiceCounters` -> names in the spec."""

RARE_WINDOWS = 5
"""Windows over which rare events count: probes, and trials of a drafter that does not pay, are 1% of the steps."""
_LISTS = {"drafters": "draftPool", "slo_classes": "sloClasses", "adapters": "adapters"}
OF_EVERY_REVISION = ("output_tokens", "slo_classes", "adapters")
"""Counters of pods of every revision; the others count pods of one."""
_TOLERANCE = 0.1
"""Share by which a window may be too short: snapshots are not taken to the second."""


@dataclass(frozen=True)
class Snapshot:
    """Totals of a service at one moment."""

    at: float
    totals: ServiceCounters
    pods_answered: int = 0
    pods_ready: int = 0


@dataclass(frozen=True)
class History:
    """Totals of a service over time. It lives in the operator's memory, so a restart begins a new one."""

    snapshots: tuple[Snapshot, ...] = ()
    """Oldest first."""
    pods: Mapping[str, tuple[float, ServiceCounters]] = field(default_factory=dict)
    """Pod name -> (start of its process, its counters) at its last report."""
    revision: str = ""
    """Revision whose pods count for more than tokens, classes and adapters."""


def names_of(service: Object | None) -> Names:
    """Names of all drafters, classes and adapters in the spec."""
    return {
        counters: frozenset(name for item in items(service, "spec", listed) if (name := text(item, "name")))
        for counters, listed in _LISTS.items()
    }


def followed_revision(revisions: Mapping[str, str], newest: str) -> str:
    """The revision with most pods; in a tie `newest`, the Deployment's. revisions: pod name -> its revision."""
    counts = TallyOf(revisions.values())
    return max(counts, key=lambda name: (counts[name], name == newest, name), default=newest)


def record(
    history: History,
    states: Mapping[str, RuntimeState],
    names: Names,
    pods_ready: int,
    at: float,
    window_s: float,
    others: Set[str] = frozenset(),
) -> History:
    """Add a snapshot to `history`, and drop snapshots that no window needs any more.

    Only counters in `names` are kept: a faulty pod may report any name. A second call for the same moment, with states
    of further pods, completes that snapshot. others: pods of another revision than the history's.
    """
    history = _without_others(history, names)
    seen = {name: (state.started_at, state.counters.only(names)) for name, state in states.items()}
    horizon = at - (RARE_WINDOWS + 1) * window_s
    earlier = tuple(old for old in history.snapshots if old.at >= horizon and old.at != at)
    answered = sum(old.pods_answered for old in history.snapshots if old.at == at) + len(states)
    snapshot = Snapshot(at, _totals(history, seen, at, others), answered, pods_ready)
    # A pod that does not answer now keeps its counters: its work until then counts at its next answer.
    snapshots = (*_thinned(earlier, at - 2.5 * window_s), snapshot)
    return replace(history, snapshots=snapshots, pods={**history.pods, **seen})


def following(history: History, revision: str) -> History:
    """`history` that follows the pods of `revision`. Drafter counters of another revision are dropped."""
    if history.revision == revision:
        return history
    snapshots = tuple(replace(snapshot, totals=_of_every_revision(snapshot.totals)) for snapshot in history.snapshots)
    return replace(history, snapshots=snapshots, revision=revision)


def forget(history: History, pods: set[str]) -> History:
    """`history` without pods that no longer exist (not in `pods`). Their counts stay in the totals."""
    return replace(history, pods={name: seen for name, seen in history.pods.items() if name in pods})


def windows(history: History, at: float, window_s: float, error: str = "") -> FigureWindows:
    """The window that ends at `at` and the one before it."""
    if error:
        return FigureWindows(error=error)
    return FigureWindows(_window(history, at, window_s), _window(history, at - window_s, window_s))


def _totals(
    history: History, seen: Mapping[str, tuple[float, ServiceCounters]], at: float, others: Set[str]
) -> ServiceCounters:
    """The last totals plus the growth of each pod; the same object if nothing grew, since most services are idle."""
    before = totals = history.snapshots[-1].totals if history.snapshots else ServiceCounters()
    began = history.snapshots[0].at if history.snapshots else at
    for name, (started_at, current) in seen.items():
        gained = _gained(history.pods.get(name), started_at, current, began)
        if gained is not None:
            totals += _of_every_revision(gained) if name in others else gained
    return before if before == totals else totals


def _gained(
    before: tuple[float, ServiceCounters] | None, started_at: float, current: ServiceCounters, began: float
) -> ServiceCounters | None:
    """Growth of a pod's counters: all of them if its process is new, None if it is older than the history."""
    if before is None:
        return current if started_at >= began else None
    process, last = before
    if process != started_at:
        return current
    return current - last if current != last else None


def _of_every_revision(counters: ServiceCounters) -> ServiceCounters:
    """The counters that count pods of every revision."""
    return ServiceCounters().model_copy(update={name: getattr(counters, name) for name in OF_EVERY_REVISION})


def _of_rare_events(counters: ServiceCounters) -> ServiceCounters:
    """The counters that the long window needs: histograms of classes take most of the memory."""
    return counters.model_copy(update={"slo_classes": {}, "adapters": {}})


def _without_others(history: History, names: Names) -> History:
    """`history` without drafters, classes and adapters that left the spec. If they return, they count from 0."""
    totals = history.snapshots[-1].totals if history.snapshots else ServiceCounters()
    if all(getattr(totals, counters).keys() <= known for counters, known in names.items()):
        return history
    snapshots = tuple(replace(snapshot, totals=snapshot.totals.only(names)) for snapshot in history.snapshots)
    return replace(history, snapshots=snapshots)


def _window(history: History, end: float, window_s: float) -> WindowCounts | None:
    last = _snapshot_at(history, end)
    # The window starts from the snapshot's own time: measured from `end`, an old snapshot would find no partner.
    first = _snapshot_at(history, last.at - window_s * (1 - _TOLERANCE)) if last is not None else None
    if last is None or first is None:
        return None
    earliest = next((snapshot for snapshot in history.snapshots if snapshot.at >= end - RARE_WINDOWS * window_s), first)
    return WindowCounts(
        window_s=last.at - first.at,
        pods_answered=last.pods_answered,
        pods_ready=last.pods_ready,
        gained=last.totals.since(first.totals),
        rare=_of_rare_events(last.totals).since(_of_rare_events(earliest.totals)),
    )


def _snapshot_at(history: History, moment: float) -> Snapshot | None:
    """The newest snapshot at or before `moment`."""
    return next((snapshot for snapshot in reversed(history.snapshots) if snapshot.at <= moment), None)


def _thinned(snapshots: tuple[Snapshot, ...], before: float) -> tuple[Snapshot, ...]:
    """Snapshots, of which those older than `before` keep only the counters that the long window needs."""
    return tuple(snapshot if snapshot.at >= before else _rare_only(snapshot) for snapshot in snapshots)


def _rare_only(snapshot: Snapshot) -> Snapshot:
    if not snapshot.totals.slo_classes and not snapshot.totals.adapters:
        return snapshot
    return replace(snapshot, totals=_of_rare_events(snapshot.totals))
