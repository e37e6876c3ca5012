"""Figures of a window from samples of the pods' counters. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from outrider_crds.state import RuntimeState

from outrider_operator.model import DrafterFigures, Figures, FigureWindows, SLOClassFigures


@dataclass(frozen=True)
class Sample:
    """One answer of one pod."""

    at: float
    """When it was read, in seconds of any steady clock."""
    state: RuntimeState


@dataclass(frozen=True)
class _Span:
    """What the counters of one process gained between two moments; spread evenly over the time between."""

    start: float
    end: float
    before: RuntimeState | None
    """None: the process started at `start`."""
    after: RuntimeState

    def share(self, start: float, end: float) -> float:
        """Share of this span that lies within the window."""
        overlap = min(self.end, end) - max(self.start, start)
        return max(0.0, overlap) / (self.end - self.start) if self.end > self.start else 0.0


def figure_windows(
    pods: Iterable[Sequence[Sample]], *, now: float, window_s: float, pods_ready: int, pods_answered: int
) -> FigureWindows:
    """The window that ends with the newest sample, and the one before it.

    A window is None where some pod was not watched over all of it (the operator has just started): a sum without
    that pod would look like a fall. A pod that started within the window counts from its start.
    """
    histories = [list(samples) for samples in pods if samples]
    if pods_ready and not pods_answered:
        return FigureWindows(error=f"none of the {pods_ready} ready pods answers on its state endpoint")
    end = max((samples[-1].at for samples in histories), default=now)
    spans = [list(_spans(samples, 2 * window_s)) for samples in histories]
    windows = [
        _figures([span for pod in spans for span in pod], start, start + window_s, pods_answered, pods_ready)
        if histories and all(pod and (pod[0].before is None or pod[0].start <= start) for pod in spans)
        else None
        for start in (end - window_s, end - 2 * window_s)
    ]
    return FigureWindows(current=windows[0], previous=windows[1])


def _spans(samples: Sequence[Sample], longest_s: float) -> Iterator[_Span]:
    """Spans between samples of one process; the first of a process that is young enough starts with it, at zero."""
    previous: Sample | None = None
    for sample in samples:
        uptime_s = max(0.0, sample.state.now - sample.state.started_at)
        if previous is not None and previous.state.started_at == sample.state.started_at:
            yield _Span(previous.at, sample.at, previous.state, sample.state)
        elif previous is not None or uptime_s <= longest_s:
            yield _Span(sample.at - uptime_s, sample.at, None, sample.state)
        previous = sample


def _figures(spans: Sequence[_Span], start: float, end: float, pods_answered: int, pods_ready: int) -> Figures:
    shares = [(span, span.share(start, end)) for span in spans]
    within = [(span, share) for span, share in shares if share > 0]

    def gained(read: Callable[[RuntimeState], float]) -> float:
        return sum(
            share * max(0.0, read(span.after) - (read(span.before) if span.before else 0.0)) for span, share in within
        )

    return Figures(
        window_s=end - start,
        pods_answered=pods_answered,
        pods_ready=pods_ready,
        output_tokens=gained(lambda state: state.output_tokens),
        request_steps=gained(lambda state: sum(state.draft_length_steps)),
        drafters=_drafters(within),
        slo_classes=_slo_classes(within),
        baseline_tokens=gained(lambda state: state.speedup.baseline_tokens),
        baseline_s=gained(lambda state: state.speedup.baseline_s),
        speculative_tokens=gained(lambda state: state.speedup.speculative_tokens),
        speculative_s=gained(lambda state: state.speedup.speculative_s),
    )


def _drafters(within: Iterable[tuple[_Span, float]]) -> dict[str, DrafterFigures]:
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for span, share in within:
        before = {d.name: d for d in span.before.drafters} if span.before else {}
        for drafter in span.after.drafters:
            old = before.get(drafter.name)
            for index, field in enumerate(("tried", "accepted", "request_steps")):
                gain = getattr(drafter, field) - (getattr(old, field) if old else 0)
                sums[drafter.name][index] += share * max(0, gain)
    return {name: DrafterFigures(*values) for name, values in sums.items()}


def _slo_classes(within: Iterable[tuple[_Span, float]]) -> dict[str, SLOClassFigures]:
    sums: dict[str, SLOClassFigures] = {}
    for span, share in within:
        before = {c.name: c for c in span.before.slo_classes} if span.before else {}
        for slo in span.after.slo_classes:
            old = before.get(slo.name)
            counts = slo.tpot.counts
            old_counts = old.tpot.counts if old and len(old.tpot.counts) == len(counts) else [0] * len(counts)
            gain = SLOClassFigures(
                finished=share * (slo.finished - (old.finished if old else 0)),
                attained=share * (slo.attained - (old.attained if old else 0)),
                tpot_counts=tuple(share * (new - was) for new, was in zip(counts, old_counts, strict=True)),
            )
            sums[slo.name] = _add(sums.get(slo.name), gain)
    return sums


def _add(one: SLOClassFigures | None, other: SLOClassFigures) -> SLOClassFigures:
    if one is None or len(one.tpot_counts) != len(other.tpot_counts):
        return other
    return SLOClassFigures(
        finished=one.finished + other.finished,
        attained=one.attained + other.attained,
        tpot_counts=tuple(a + b for a, b in zip(one.tpot_counts, other.tpot_counts, strict=True)),
    )
