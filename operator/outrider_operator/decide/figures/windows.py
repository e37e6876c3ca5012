"""From the pods' counters to the figures of a window; counters survive restarts of pods.

Each pod's counters grow from the start of its process. `record` adds what each grew by since the last look to
totals of the service, which only grow, and keeps the totals over time; a window is the difference of two of them.
Prometheus gives the same counters (by the same names) from `increase`, and `figures_of` reads both.

What tells how well drafters do is counted of one revision's pods: a drafter's name may mean another draft in the next.
"""

from __future__ import annotations

from collections import Counter as TallyOf
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from outrider_crds.state import TPOT_BUCKETS_S, RuntimeState

from outrider_operator.inbound.reading import items, text
from outrider_operator.model import DrafterFigures, Figures, FigureWindows, Object, SLOClassFigures

Counter = tuple[str, ...]
Counters = Mapping[Counter, float]
"""("output_tokens",), ("drafter", NAME, "tried"), ("class", NAME, "tpot", INDEX), ("probe", "baseline_s") ..."""

RARE_WINDOWS = 5
"""Probes, and the trials of a drafter that does not pay, are 1% of the steps: they are counted over so many windows."""
_RARE = {"probe", "drafter", "steps", "speculative_steps"}
_NAMED = {"drafter", "class"}
_BY_REVISION = {"probe", "drafter", "steps", "speculative_steps", "request_steps", "busy_s"}
"""Counted of the pods of one revision only; the others are sums over all pods that users are served by."""
_TOLERANCE = 0.1
"""A window may be shorter than asked by this share: looks are not taken to the second."""


@dataclass(frozen=True)
class Look:
    """The totals at one moment."""

    at: float
    totals: Counters
    pods_answered: int = 0
    pods_ready: int = 0


@dataclass(frozen=True)
class History:
    """Totals of a service over time. The operator keeps one in memory; a restart of it begins a new one."""

    looks: tuple[Look, ...] = ()
    """Oldest first."""
    pods: Mapping[str, tuple[float, Counters]] = field(default_factory=dict)
    """Pod name -> (start of its process, its counters), as last seen."""
    revision: str = ""
    """Revision that the counters of `_BY_REVISION` are of."""


def names_of(service: Object | None) -> frozenset[Counter]:
    """("drafter", NAME) and ("class", NAME) of all that the service's spec names."""
    lists = {"drafter": items(service, "spec", "draftPool"), "class": items(service, "spec", "sloClasses")}
    return frozenset(
        (kind, text(item, "name")) for kind, found in lists.items() for item in found if text(item, "name")
    )


def followed_revision(revisions: Mapping[str, str], newest: str) -> str:
    """The revision of most pods; `newest`, the Deployment's, where two have as many. revisions: pod -> its revision."""
    counts = TallyOf(revisions.values())
    return max(counts, key=lambda name: (counts[name], name == newest, name), default=newest)


def record(
    history: History,
    states: Mapping[str, RuntimeState],
    names: Set[Counter],
    pods_ready: int,
    now: float,
    window_s: float,
    others: Set[str] = frozenset(),
) -> History:
    """`history` with one more look; looks that no window can reach any more are dropped.

    Totals are kept of `names` only: a pod may name anything. Called again for the same moment with further pods'
    states, it completes that look. others: pods of another revision than the history's.
    """
    history = _without_others(history, names)
    seen = {name: (state.started_at, counters(state)) for name, state in states.items()}
    horizon = now - (RARE_WINDOWS + 1) * window_s
    earlier = tuple(old for old in history.looks if old.at >= horizon and old.at != now)
    answered = sum(old.pods_answered for old in history.looks if old.at == now) + len(states)
    look = Look(now, _totals(history, seen, names, now, others), answered, pods_ready)
    # A pod that does not answer this time keeps its counters: what it does meanwhile counts at its next answer.
    looks = (*_thinned(earlier, now - 2.5 * window_s), look)
    return replace(history, looks=looks, pods={**history.pods, **seen})


def following(history: History, revision: str) -> History:
    """`history` of the pods of `revision`: what was counted of another's drafters is dropped."""
    if history.revision == revision:
        return history
    looks = tuple(replace(look, totals=_of_every_revision(look.totals)) for look in history.looks)
    return replace(history, looks=looks, revision=revision)


def forget(history: History, pods: set[str]) -> History:
    """`history` without the pods that are gone for good (not in `pods`); their counts stay in the totals."""
    return replace(history, pods={name: seen for name, seen in history.pods.items() if name in pods})


def windows(history: History, now: float, window_s: float, error: str = "") -> FigureWindows:
    """The window that ends now and the one before it."""
    if error:
        return FigureWindows(error=error)
    return FigureWindows(_window(history, now, window_s), _window(history, now - window_s, window_s))


def counters(state: RuntimeState) -> dict[Counter, float]:
    """The counters of one pod that figures are made of; those at 0 are left out."""
    found: dict[Counter, float] = {
        ("output_tokens",): state.output_tokens,
        ("request_steps",): sum(state.draft_length_steps),
        ("busy_s",): state.busy_s,
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
        found["drafter", drafter.name, "tried"] = drafter.tried
        found["drafter", drafter.name, "accepted"] = drafter.accepted
        found["drafter", drafter.name, "request_steps"] = drafter.request_steps
    for slo in state.slo_classes:
        found["class", slo.name, "finished"] = slo.finished
        found["class", slo.name, "attained"] = slo.attained
        found["class", slo.name, "aborted"] = slo.aborted
        for index, count in enumerate(slo.tpot.counts):
            found["class", slo.name, "tpot", str(index)] = count
    return {key: float(value) for key, value in found.items() if value}


def figures_of(gained: Counters, rare: Counters, *, window_s: float, pods_answered: int, pods_ready: int) -> Figures:
    """Figures from what the counters gained in a window, and (where that is little) in a longer one, `rare`."""
    classes = {key[1] for key in gained if key[0] == "class"}
    return Figures(
        window_s=window_s,
        pods_answered=pods_answered,
        pods_ready=pods_ready,
        output_tokens=gained.get(("output_tokens",), 0.0),
        request_steps=gained.get(("request_steps",), 0.0),
        drafters=_drafters(gained),
        drafters_long=_drafters(rare),
        busy_s=gained.get(("busy_s",), 0.0),
        busy_steps=gained.get(("steps",), 0.0),
        slo_classes={name: _slo_class(gained, name) for name in classes},
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
    """1 + accepted tokens / (request, step) pairs; 0 without such pairs."""
    pairs = gained.get(("request_steps",), 0.0)
    accepted = sum(drafter.accepted for drafter in _drafters(gained).values())
    return 1.0 + accepted / pairs if pairs > 0 else 0.0


def _of_every_revision(counts: Counters) -> Counters:
    """The counters that are summed over pods of every revision."""
    return {key: value for key, value in counts.items() if key[0] not in _BY_REVISION}


def _totals(
    history: History,
    seen: Mapping[str, tuple[float, Counters]],
    names: Set[Counter],
    now: float,
    others: Set[str],
) -> Counters:
    """The totals so far and what each pod gained; the very same ones where nobody did: most services are idle."""
    before = history.looks[-1].totals if history.looks else {}
    began = history.looks[0].at if history.looks else now
    totals = dict(before)
    for name, (started_at, current) in seen.items():
        gains = _gained(history.pods.get(name), started_at, current, began, names)
        for key, gained in (_of_every_revision(gains) if name in others else gains).items():
            totals[key] = totals.get(key, 0.0) + gained
    return before if before == totals else totals


def _gained(
    before: tuple[float, Counters] | None, started_at: float, current: Counters, began: float, names: Set[Counter]
) -> Mapping[Counter, float]:
    """What a pod's counters grew by. All of it when its process is new; nothing yet when it is older than we are."""
    current = _of(current, names)
    if before is None:
        return current if started_at >= began else {}
    process, old = before[0], _of(before[1], names)
    if process != started_at or any(current.get(key, 0.0) < value for key, value in old.items()):
        return current
    return {key: value - old.get(key, 0.0) for key, value in current.items() if value != old.get(key, 0.0)}


def _of(found: Counters, names: Set[Counter]) -> Counters:
    """Those of the service as a whole, and of its drafters and classes that are in `names`."""
    return {key: value for key, value in found.items() if key[0] not in _NAMED or key[:2] in names}


def _without_others(history: History, names: Set[Counter]) -> History:
    """`history` without what left the spec, at any time: when it comes back, it is counted anew."""
    if not history.looks or len(_of(history.looks[-1].totals, names)) == len(history.looks[-1].totals):
        return history
    return replace(history, looks=tuple(replace(look, totals=_of(look.totals, names)) for look in history.looks))


def _window(history: History, end: float, window_s: float) -> Figures | None:
    last = _look_at(history, end)
    # Counted back from the look itself: counted from `end`, a look that is some seconds old would find no partner.
    first = _look_at(history, last.at - window_s * (1 - _TOLERANCE)) if last is not None else None
    if last is None or first is None:
        return None
    earliest = next((look for look in history.looks if look.at >= end - RARE_WINDOWS * window_s), first)
    return figures_of(
        _difference(last, first),
        _difference(last, earliest),
        window_s=last.at - first.at,
        pods_answered=last.pods_answered,
        pods_ready=last.pods_ready,
    )


def _look_at(history: History, moment: float) -> Look | None:
    """The newest look at or before `moment`."""
    return next((look for look in reversed(history.looks) if look.at <= moment), None)


def _difference(last: Look, first: Look) -> dict[Counter, float]:
    return {key: value - first.totals.get(key, 0.0) for key, value in last.totals.items()}


def _thinned(looks: tuple[Look, ...], before: float) -> tuple[Look, ...]:
    """Looks that only the long window still reads, cut down to the counters that it needs."""
    return tuple(look if look.at >= before else _rare_only(look) for look in looks)


def _rare_only(look: Look) -> Look:
    if all(key[0] in _RARE for key in look.totals):
        return look
    return replace(look, totals={key: value for key, value in look.totals.items() if key[0] in _RARE})


def _drafters(gained: Counters) -> dict[str, DrafterFigures]:
    return {name: _drafter(gained, name) for name in {key[1] for key in gained if key[0] == "drafter"}}


def _drafter(gained: Counters, name: str) -> DrafterFigures:
    return DrafterFigures(
        tried=gained.get(("drafter", name, "tried"), 0.0),
        accepted=gained.get(("drafter", name, "accepted"), 0.0),
        request_steps=gained.get(("drafter", name, "request_steps"), 0.0),
    )


def _slo_class(gained: Counters, name: str) -> SLOClassFigures:
    return SLOClassFigures(
        finished=gained.get(("class", name, "finished"), 0.0),
        attained=gained.get(("class", name, "attained"), 0.0),
        aborted=gained.get(("class", name, "aborted"), 0.0),
        tpot_counts=tuple(gained.get(("class", name, "tpot", str(i)), 0.0) for i in range(len(TPOT_BUCKETS_S) + 1)),
    )
