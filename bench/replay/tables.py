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
"""Bar at each point of static load -> bar of the mean over a world's points."""


def tables(figures: dict[str, Any]) -> str:
    bars = [Bar(**bar) for bar in figures["bars"]]
    parts = [_static_tables(figures, bars), *(_slo(row) for row in figures["slo"])]
    return "\n\n".join([*parts, _summarise_bars(bars, "4 "), _list_bars(bars, "5 "), _profiles(figures["profiles"])])


def _table(*rows: Sequence[str]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _static_tables(figures: dict[str, Any], bars: Sequence[Bar]) -> str:
    """Make a row for each world, then one for each point that misses."""
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
    """Make a row: geometric mean over the world's points, how many hold, and the worst one."""
    cells = []
    for at_point, mean in AT_POINTS.items():
        world_bars = [bar for bar in bars if bar.name == at_point and bar.where.startswith(f"{name},")]
        whole = [f"{bar.value:.3f} in the mean, " for bar in bars if bar.name == mean and bar.where == name]
        cells.append(
            f"{''.join(whole)}{sum(bar.holds for bar in world_bars)} hold, "
            f"worst {min(bar.value for bar in world_bars):.3f}"
        )
    return name, str(len(world_bars)), *cells


def _list_bars(bars: Sequence[Bar], prefix: str) -> str:
    rows = [(bar.name.removeprefix(prefix), bar.where, bar.against, _verdict(bar)) for bar in bars]
    kept = [row for row, bar in zip(rows, bars, strict=True) if bar.name.startswith(prefix)]
    return _table(("bar", "where", "against", "result"), *kept)


def _summarise_bars(bars: Sequence[Bar], prefix: str) -> str:
    """Make a row for each name: how many of its bars hold, and the worst one."""
    names = dict.fromkeys(bar.name for bar in bars if bar.name.startswith(prefix))
    rows = []
    for name in names:
        named_bars = [bar for bar in bars if bar.name == name]
        worst = min(named_bars, key=lambda bar: bar.value / bar.least)
        met = f"{sum(bar.holds for bar in named_bars)} of {len(named_bars)}"
        rows.append((name.removeprefix(prefix), met, f"{worst.value:.3f} of {worst.least:.3f}", worst.where))
    return _table(("bar", "hold", "worst", "where"), *rows)


def _profiles(worlds: dict[str, dict[str, dict[str, float]]]) -> str:
    """Make the table of the profiles' errors: median and worst."""
    rows = [
        (world, part, f"{of['medianErrorPercent']:.1f}%, {of['worstErrorPercent']:+.1f}%")
        for world, parts in worlds.items()
        for part, of in parts.items()
    ]
    return _table(("world", "part", "error of its profile: median, worst"), *rows)


def _verdict(bar: Bar) -> str:
    shown = (
        bar.value if bar.holds else math.floor(1000 * bar.value) / 1000
    )  # rounds down: a miss must not look like the bar
    return f"{shown:.3f} of {bar.least:.3f}, {'holds' if bar.holds else 'missed'}"


def _slo(row: dict[str, Any]) -> str:
    there = [
        (name, f"{np.mean(of['attained']):.1%}", *map(_format_values, of["ttftMs"].values()))
        for name, of in row["there"].items()
    ]
    classes = [f"TTFT p50, p99 of {name} (ms)" for name in next(iter(row["there"].values()))["ttftMs"]]
    rates = _table(("share of capacity", *(f"{rate:.0%}" for rate in row["rates"])), *_attainment_rows(row))
    title = f"{row['world']}, {row['share']:.0%} of capacity, best baseline {row['base']}"
    return f"{title}\n\n{_table(('system', 'attained', *classes), *there)}\n\n{rates}"


def _format_values(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def _attainment_rows(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys((ADMITTED[0], row["base"], *ADMITTED[1:])):
        yield name, *(f"{share:.0%}" for share in row["attained"][name])
