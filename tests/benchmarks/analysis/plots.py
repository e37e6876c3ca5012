"""One plot a scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

from tests.benchmarks.analysis import attainment, latency, throughput
from tests.benchmarks.evidence.raw import Run
from tests.benchmarks.evidence.scenario import System, SystemKind

matplotlib.use("Agg")
from matplotlib import pyplot, ticker

STYLES = {
    SystemKind.OURS: {"color": "black", "linewidth": 2.2, "zorder": 3},
    SystemKind.STOCK: {"color": "tab:gray", "linewidth": 1.6, "linestyle": "--"},
    SystemKind.TABLE: {"color": "tab:green", "linewidth": 1.2},
}
DRAFTER_COLOURS = {"lookup": "tab:orange", "eagle": "tab:blue", "draft": "tab:red"}


def style(system: System) -> dict[str, Any]:
    if system.kind is not SystemKind.STATIC:
        return {**STYLES[system.kind], "label": system.name}
    alpha = 0.35 + 0.13 * min(system.draft_tokens, 5)
    return {"color": DRAFTER_COLOURS.get(system.drafter, "tab:purple"), "alpha": alpha, "label": system.name}


def plot_throughput(runs: Sequence[Run], systems: Mapping[str, System], title: str, file: Path) -> None:
    """A panel for each group or acceptance: tokens a second over concurrency, by no speculation's."""
    panels: dict[str, dict[int, dict[str, dict[int, float]]]] = {}
    for name, of_system in throughput.speeds(runs, systems).items():
        group, _, slots = name.rpartition(" at ")
        panels.setdefault(group, {})[int(slots)] = of_system
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), sharey=True, squeeze=False)
    for axis, (group, points) in zip(axes[0], panels.items(), strict=True):
        for name in sorted({system for of_system in points.values() for system in of_system}):
            drawn = [(slots, _of_none(points[slots], name, systems)) for slots in sorted(points)]
            known = [(slots, value) for slots, value in drawn if value is not None]
            axis.plot([slots for slots, _ in known], [value for _, value in known], marker=".", **style(systems[name]))
        axis.set(xscale="log", title=group, xlabel="requests at the same time")
        axis.set_xticks(sorted(points), [str(slots) for slots in sorted(points)])
        axis.minorticks_off()
    axes[0][0].set_ylabel("tokens/s by no speculation's")
    _save(figure, axes[0][-1], title, file)


def _of_none(of_system: Mapping[str, Mapping[int, float]], name: str, systems: Mapping[str, System]) -> float | None:
    """Median over the repeats that both have."""
    plain = next((one for one in of_system if systems[one].kind is SystemKind.STOCK), None)
    if plain is None or name not in of_system:
        return None
    both = of_system[name].keys() & of_system[plain].keys()
    return median(of_system[name][one] / of_system[plain][one] for one in both) if both else None


def plot_latency(runs: Sequence[Run], systems: Mapping[str, System], title: str, file: Path) -> None:
    """A panel for each phase: the distribution of request latency."""
    phases = latency.phases(runs)
    figure, axes = pyplot.subplots(1, len(phases), figsize=(4.2 * len(phases), 4), sharey=True, squeeze=False)
    for axis, phase in zip(axes[0], phases, strict=True):
        for name in sorted({run.system for run in runs}):
            values = sorted(latency.latencies(runs, name, phase).values())
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axis.plot(values, shares, **style(systems[name]))
        axis.set(xscale="log", title=phase, xlabel="request latency, s")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes[0][0].set_ylabel("share of requests")
    _save(figure, axes[0][-1], title, file)


def plot_attainment(
    found: Sequence[attainment.Attained], systems: Mapping[str, System], title: str, file: Path
) -> None:
    """Attainment, and requests a second that met their SLO, over load."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), squeeze=False)
    loads = list(dict.fromkeys(one.load for one in found))
    for name in sorted({one.system for one in found}):
        mine = [one for one in found if one.system == name]
        places = [loads.index(one.load) for one in mine]
        axes[0][0].plot(places, [100 * one.attainment for one in mine], marker=".", **style(systems[name]))
        axes[0][1].plot(places, [one.request_goodput for one in mine], marker=".", **style(systems[name]))
    for axis in axes[0]:
        axis.set_xticks(range(len(loads)), loads)
    axes[0][0].set(ylabel="attainment, %", ylim=(0, 102))
    axes[0][1].set_ylabel("request goodput, requests/s")
    _save(figure, axes[0][-1], title, file)


def _save(figure: Any, last: Any, title: str, file: Path) -> None:
    last.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
