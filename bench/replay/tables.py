"""The tables of docs/results/replay.md, from a run's results: `python -m bench.replay --tables`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.replay.bars import Bar

ADMITTED = ("plain", "adaptive verification", "admission alone", "ours without admission", "ours")
"""Systems whose attainment is shown at every rate, together with the best baseline."""


AT_POINTS = {
    "1 static load": "1 static load, geometric mean",
    "1 static load, of plain": "",
    "6 adaptive verification": "6 adaptive verification, geometric mean",
}
"""Bars at each point of static load, and in the mean over a world's."""


def tables(figures: dict[str, Any]) -> str:
    bars = [Bar(**bar) for bar in figures["bars"]]
    parts = [_static(figures, bars), _listed(bars, "2 "), *(_slo(row) for row in figures["slo"])]
    return "\n\n".join([*parts, _summed(bars, "4 "), _listed(bars, "5 "), _profiles(figures["profiles"])])


def _table(*rows: Sequence[str]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _static(figures: dict[str, Any], bars: Sequence[Bar]) -> str:
    """A row a world; then the points that miss."""
    worlds = dict.fromkeys(row["world"] for row in figures["static"])
    head = ("world", "points", "of each point's best static", "of plain decoding", "of adaptive verification")
    missed = [
        (bar.where, bar.name.removeprefix("1 "), bar.against, _verdict(bar))
        for bar in bars
        if bar.name in AT_POINTS and not bar.holds
    ]
    rows = _table(head, *(_world(name, bars) for name in worlds))
    return f"{rows}\n\n{_table(('missed at', 'bar', 'against', 'result'), *missed)}" if missed else rows


def _world(name: str, bars: Sequence[Bar]) -> tuple[str, ...]:
    """Geometric mean over its points, how many hold, and the worst one."""
    cells = []
    for at_point, mean in AT_POINTS.items():
        world_bars = [bar for bar in bars if bar.name == at_point and bar.where.startswith(f"{name},")]
        whole = [f"{bar.value:.3f} in the mean, " for bar in bars if bar.name == mean and bar.where == name]
        cells.append(
            f"{''.join(whole)}{sum(bar.holds for bar in world_bars)} hold, "
            f"worst {min(bar.value for bar in world_bars):.3f}"
        )
    return name, str(len(world_bars)), *cells


def _listed(bars: Sequence[Bar], prefix: str) -> str:
    rows = [(bar.name.removeprefix(prefix), bar.where, bar.against, _verdict(bar)) for bar in bars]
    kept = [row for row, bar in zip(rows, bars, strict=True) if bar.name.startswith(prefix)]
    return _table(("bar", "where", "against", "result"), *kept)


def _summed(bars: Sequence[Bar], prefix: str) -> str:
    """A row a name, where all hold or nearly: how many, and the worst."""
    names = dict.fromkeys(bar.name for bar in bars if bar.name.startswith(prefix))
    rows = []
    for name in names:
        named_bars = [bar for bar in bars if bar.name == name]
        worst = min(named_bars, key=lambda bar: bar.value / bar.least)
        met = f"{sum(bar.holds for bar in named_bars)} of {len(named_bars)}"
        rows.append((name.removeprefix(prefix), met, f"{worst.value:.3f} of {worst.least:.3f}", worst.where))
    return _table(("bar", "hold", "worst", "where"), *rows)


def _profiles(worlds: dict[str, dict[str, dict[str, float]]]) -> str:
    """How far what the profiles predict is from the worlds: the median, and the worst."""
    rows = [
        (world, part, f"{of['medianErrorPercent']:.1f}%, {of['worstErrorPercent']:+.1f}%")
        for world, parts in worlds.items()
        for part, of in parts.items()
    ]
    return _table(("world", "part", "error of its profile: median, worst"), *rows)


def _verdict(bar: Bar) -> str:
    shown = bar.value if bar.holds else math.floor(1000 * bar.value) / 1000  # never as if it were reached
    return f"{shown:.3f} of {bar.least:.3f}, {'holds' if bar.holds else 'missed'}"


def _slo(row: dict[str, Any]) -> str:
    there = [
        (name, f"{np.mean(of['attained']):.1%}", *map(_rounded, of["ttftMs"].values()))
        for name, of in row["there"].items()
    ]
    classes = [f"TTFT p50, p99 of {name} (ms)" for name in next(iter(row["there"].values()))["ttftMs"]]
    rates = _table(("share of capacity", *(f"{rate:.0%}" for rate in row["rates"])), *_attained(row))
    title = f"{row['world']}, {row['share']:.0%} of capacity, best baseline {row['base']}"
    return f"{title}\n\n{_table(('system', 'attained', *classes), *there)}\n\n{rates}"


def _rounded(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def _attained(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys((ADMITTED[0], row["base"], *ADMITTED[1:])):
        yield name, *(f"{share:.0%}" for share in row["attained"][name])
