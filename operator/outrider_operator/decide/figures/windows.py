"""Compute the figures of a window from the pods' counters. Restarts of pods lose no counts.

The counters of a pod grow from the start of its process. `record` adds their growth since the last snapshot to totals
of the service, and keeps totals over time. A window is the difference of two snapshots. Prometheus returns the same
counters, under the same names, from `increase`; `figures_of` reads both.

Drafter counters come from pods of one revision only: in the next revision a name may stand for another draft.
"""

from __future__ import annotations

from collections import Counter as TallyOf
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from outrider_crds.runtime_state import TPOT_BUCKETS_S, RuntimeState

from outrider_operator.cluster_model import (
    AdapterFigures,
    DrafterFigures,
    FigureWindows,
    Object,
    SLOClassFigures,
    WindowFigures,
)
from outrider_operator.validation.reading import items, text

Counter = tuple[str, ...]
Counters = Mapping[Counter, float]
"""("output_tokens",), ("drafter", NAME, "tried"), ("class", NAME, "tpot", INDEX), ("adapter", NAME, "tried"),
("probe", "baseline_s") ..."""

RARE_WINDOWS = 5
"""Windows over which rare events count: probes, and trials of a drafter that does not pay, are 1% of the steps."""
_RARE = {"probe", "drafter", "steps", "speculative_steps"}
_NAMED = {"drafter", "class", "adapter"}
_BY_REVISION = {
    "probe", "drafter", "steps", "speculative_steps", "request_steps", "busy_s",
    "batch_squared", "batch_accepted", "batch_busy_s", "prompt_busy_s",
}  # fmt: skip
"""Counters of the pods of one revision only. The others are sums over all pods that serve."""
_TOLERANCE = 0.1
"""Share by which a window may be too short: snapshots are not taken to the second."""


@dataclass(frozen=True)
class Snapshot:
    """Totals of a service at one moment."""

    at: float
    totals: Counters
    pods_answered: int = 0
    pods_ready: int = 0


@dataclass(frozen=True)
class History:
    """Totals of a service over time. It lives in the operator's memory, so a restart begins a new one."""

    snapshots: tuple[Snapshot, ...] = ()
    """Oldest first."""
    pods: Mapping[str, tuple[float, Counters]] = field(default_factory=dict)
    """Pod name -> (start of its process, its counters) at its last report."""
    revision: str = ""
    """Revision whose pods the counters in `_BY_REVISION` count."""


def names_of(service: Object | None) -> frozenset[Counter]:
    """("drafter", NAME), ("class", NAME) and ("adapter", NAME) for all in the spec."""
    fields = {"drafter": "draftPool", "class": "sloClasses", "adapter": "adapters"}
    lists = {kind: items(service, "spec", name) for kind, name in fields.items()}
    return frozenset(
        (kind, text(item, "name")) for kind, entries in lists.items() for item in entries if text(item, "name")
    )


def followed_revision(revisions: Mapping[str, str], newest: str) -> str:
    """The revision with most pods; in a tie `newest`, the Deployment's. revisions: pod name -> its revision."""
    counts = TallyOf(revisions.values())
    return max(counts, key=lambda name: (counts[name], name == newest, name), default=newest)


def record(
    history: History,
    states: Mapping[str, RuntimeState],
    names: Set[Counter],
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
    seen = {name: (state.started_at, counters(state)) for name, state in states.items()}
    horizon = at - (RARE_WINDOWS + 1) * window_s
    earlier = tuple(old for old in history.snapshots if old.at >= horizon and old.at != at)
    answered = sum(old.pods_answered for old in history.snapshots if old.at == at) + len(states)
    snapshot = Snapshot(at, _totals(history, seen, names, at, others), answered, pods_ready)
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


def counters(state: RuntimeState) -> dict[Counter, float]:
    """The counters of one pod that figures need; those at 0 are left out."""
    values: dict[Counter, float] = {
        ("output_tokens",): state.output_tokens,
        ("request_steps",): sum(state.draft_length_steps),
        ("busy_s",): state.busy_s,
        ("batch_squared",): state.batch_squared,
        ("batch_accepted",): state.batch_accepted,
        ("batch_busy_s",): state.batch_busy_s,
        ("prompt_busy_s",): state.prompt_busy_s,
        ("steps",): state.steps,
        ("speculative_steps",): state.speculative_steps,
        ("probe", "count"): state.speedup.probes,
        ("probe", "weight"): state.speedup.weight,
        ("probe", "weighted_ratio"): state.speedup.weighted_ratio,
        ("probe", "baseline_tokens"): state.speedup.baseline_tokens,
        ("probe", "baseline_s"): state.speedup.baseline_s,
        ("probe", "speculative_tokens"): state.speedup.speculative_tokens,
        ("probe", "speculative_s"): state.speedup.speculative_s,
    }
    for drafter in state.drafters:
        values["drafter", drafter.name, "tried"] = drafter.tried
        values["drafter", drafter.name, "accepted"] = drafter.accepted
        values["drafter", drafter.name, "request_steps"] = drafter.request_steps
    for slo in state.slo_classes:
        values["class", slo.name, "finished"] = slo.finished
        values["class", slo.name, "attained"] = slo.attained
        values["class", slo.name, "aborted"] = slo.aborted
        for index, count in enumerate(slo.tpot.counts):
            values["class", slo.name, "tpot", str(index)] = count
    for adapter in state.adapters:
        values["adapter", adapter.name, "tried"] = adapter.tried
        values["adapter", adapter.name, "accepted"] = adapter.accepted
        values["adapter", adapter.name, "finished"] = sum(adapter.finished.values())
        values["adapter", adapter.name, "attained"] = sum(adapter.attained.values())
    return {key: float(value) for key, value in values.items() if value}


def figures_of(
    gained: Counters, rare: Counters, *, window_s: float, pods_answered: int, pods_ready: int
) -> WindowFigures:
    """Figures from the growth of counters in a window, and for rare events in a longer one (`rare`)."""
    classes = {key[1] for key in gained if key[0] == "class"}
    return WindowFigures(
        window_s=window_s,
        pods_answered=pods_answered,
        pods_ready=pods_ready,
        output_tokens=gained.get(("output_tokens",), 0.0),
        request_steps=gained.get(("request_steps",), 0.0),
        drafters=_drafters(gained),
        drafters_long=_drafters(rare),
        busy_s=gained.get(("busy_s",), 0.0),
        batch_squared=gained.get(("batch_squared",), 0.0),
        batch_accepted=gained.get(("batch_accepted",), 0.0),
        batch_busy_s=gained.get(("batch_busy_s",), 0.0),
        prompt_busy_s=gained.get(("prompt_busy_s",), 0.0),
        busy_steps=gained.get(("steps",), 0.0),
        slo_classes={name: _slo_class(gained, name) for name in classes},
        adapters=_adapters(gained),
        steps=rare.get(("steps",), 0.0),
        speculative_steps=rare.get(("speculative_steps",), 0.0),
        probes=rare.get(("probe", "count"), 0.0),
        tokens_per_step=_tokens_per_step(rare),
        probe_weight=rare.get(("probe", "weight"), 0.0),
        probe_weighted_ratio=rare.get(("probe", "weighted_ratio"), 0.0),
        baseline_tokens=rare.get(("probe", "baseline_tokens"), 0.0),
        baseline_s=rare.get(("probe", "baseline_s"), 0.0),
        speculative_tokens=rare.get(("probe", "speculative_tokens"), 0.0),
        speculative_s=rare.get(("probe", "speculative_s"), 0.0),
    )


def _tokens_per_step(gained: Counters) -> float:
    """Tokens per step of a request: 1 + accepted tokens / (request, step) pairs; 0 without such pairs."""
    pairs = gained.get(("request_steps",), 0.0)
    accepted = sum(drafter.accepted for drafter in _drafters(gained).values())
    return 1.0 + accepted / pairs if pairs > 0 else 0.0


def _of_every_revision(counts: Counters) -> Counters:
    """The counters that count pods of every revision."""
    return {key: value for key, value in counts.items() if key[0] not in _BY_REVISION}


def _totals(
    history: History,
    seen: Mapping[str, tuple[float, Counters]],
    names: Set[Counter],
    at: float,
    others: Set[str],
) -> Counters:
    """The last totals plus the growth of each pod; the same object if nothing grew, since most services are idle."""
    before = history.snapshots[-1].totals if history.snapshots else {}
    began = history.snapshots[0].at if history.snapshots else at
    totals = dict(before)
    for name, (started_at, current) in seen.items():
        gains = _gained(history.pods.get(name), started_at, current, began, names)
        for key, gained in (_of_every_revision(gains) if name in others else gains).items():
            totals[key] = totals.get(key, 0.0) + gained
    return before if before == totals else totals


def _gained(
    before: tuple[float, Counters] | None, started_at: float, current: Counters, began: float, names: Set[Counter]
) -> Mapping[Counter, float]:
    """Growth of a pod's counters: all of them if its process is new, none if it is older than the history."""
    current = _of(current, names)
    if before is None:
        return current if started_at >= began else {}
    process, old = before[0], _of(before[1], names)
    if process != started_at or any(current.get(key, 0.0) < value for key, value in old.items()):
        return current
    return {key: value - old.get(key, 0.0) for key, value in current.items() if value != old.get(key, 0.0)}


def _of(counters_by_key: Counters, names: Set[Counter]) -> Counters:
    """Counters of the whole service, and of the drafters and classes in `names`."""
    return {key: value for key, value in counters_by_key.items() if key[0] not in _NAMED or key[:2] in names}


def _without_others(history: History, names: Set[Counter]) -> History:
    """`history` without drafters and classes that left the spec. If they return, they count from 0."""
    if not history.snapshots or len(_of(history.snapshots[-1].totals, names)) == len(history.snapshots[-1].totals):
        return history
    return replace(
        history,
        snapshots=tuple(replace(snapshot, totals=_of(snapshot.totals, names)) for snapshot in history.snapshots),
    )


def _window(history: History, end: float, window_s: float) -> WindowFigures | None:
    last = _snapshot_at(history, end)
    # The window starts from the snapshot's own time: measured from `end`, an old snapshot would find no partner.
    first = _snapshot_at(history, last.at - window_s * (1 - _TOLERANCE)) if last is not None else None
    if last is None or first is None:
        return None
    earliest = next((snapshot for snapshot in history.snapshots if snapshot.at >= end - RARE_WINDOWS * window_s), first)
    return figures_of(
        _difference(last, first),
        _difference(last, earliest),
        window_s=last.at - first.at,
        pods_answered=last.pods_answered,
        pods_ready=last.pods_ready,
    )


def _snapshot_at(history: History, moment: float) -> Snapshot | None:
    """The newest snapshot at or before `moment`."""
    return next((snapshot for snapshot in reversed(history.snapshots) if snapshot.at <= moment), None)


def _difference(last: Snapshot, first: Snapshot) -> dict[Counter, float]:
    return {key: value - first.totals.get(key, 0.0) for key, value in last.totals.items()}


def _thinned(snapshots: tuple[Snapshot, ...], before: float) -> tuple[Snapshot, ...]:
    """Snapshots, of which those older than `before` keep only the counters that the long window needs."""
    return tuple(snapshot if snapshot.at >= before else _rare_only(snapshot) for snapshot in snapshots)


def _rare_only(snapshot: Snapshot) -> Snapshot:
    if all(key[0] in _RARE for key in snapshot.totals):
        return snapshot
    return replace(snapshot, totals={key: value for key, value in snapshot.totals.items() if key[0] in _RARE})


def _drafters(gained: Counters) -> dict[str, DrafterFigures]:
    return {name: _drafter(gained, name) for name in {key[1] for key in gained if key[0] == "drafter"}}


def _drafter(gained: Counters, name: str) -> DrafterFigures:
    return DrafterFigures(
        tried=gained.get(("drafter", name, "tried"), 0.0),
        accepted=gained.get(("drafter", name, "accepted"), 0.0),
        request_steps=gained.get(("drafter", name, "request_steps"), 0.0),
    )


def _adapters(gained: Counters) -> dict[str, AdapterFigures]:
    return {name: _adapter(gained, name) for name in {key[1] for key in gained if key[0] == "adapter"}}


def _adapter(gained: Counters, name: str) -> AdapterFigures:
    return AdapterFigures(
        tried=gained.get(("adapter", name, "tried"), 0.0),
        accepted=gained.get(("adapter", name, "accepted"), 0.0),
        finished=gained.get(("adapter", name, "finished"), 0.0),
        attained=gained.get(("adapter", name, "attained"), 0.0),
    )


def _slo_class(gained: Counters, name: str) -> SLOClassFigures:
    return SLOClassFigures(
        finished=gained.get(("class", name, "finished"), 0.0),
        attained=gained.get(("class", name, "attained"), 0.0),
        aborted=gained.get(("class", name, "aborted"), 0.0),
        tpot_counts=tuple(gained.get(("class", name, "tpot", str(i)), 0.0) for i in range(len(TPOT_BUCKETS_S) + 1)),
    )
