"""The README's picture, made from the judge's results: speed-up over plain decoding by concurrent requests.

python -m bench.virtual_clock.picture     reads results/judge.json, writes docs/images/speedup.png (with matplotlib)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.replay.bars import low_quantile

RESULTS = Path(__file__).parents[1] / "results" / "judge.json"
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "speedup.png"
_POINT = re.compile(r"(?P<world>[^,]+), (?P<acceptance>[^,]+), .+, (?P<clients>\d+) requests")
COLOURS = {"recorded": "tab:grey", "0.5": "tab:blue", "0.7": "tab:green", "0.9": "tab:red"}
"""Acceptance rate of the first proposal -> colour."""
CONCURRENCY = (1, 8, 32, 64, 128, 256)
SPEEDUPS = (1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point's speed-ups over plain decoding, above 1 is better: the 5% quantile over seeds."""

    clients: int
    acceptance: str
    outrider: float
    best_fixed: float


def mark(point: str, latency_s: Mapping[str, Sequence[float]]) -> Mark:
    """Make the mark of a point of results/judge.json."""
    name = _POINT.fullmatch(point)
    if name is None:
        raise ValueError(f"no point of the judge: {point}")
    outrider, best_fixed = (_speedup(latency_s["plain"], latency_s[system]) for system in ("ours", "best static"))
    return Mark(int(name["clients"]), name["acceptance"], outrider, best_fixed)


def _speedup(plain_s: Sequence[float], system_s: Sequence[float]) -> float:
    return low_quantile([plain / system for plain, system in zip(plain_s, system_s, strict=True)])


def draw(marks: Sequence[Mark], path: Path) -> None:
    """Draw filled marks for Outrider, hollow ones for the best fixed setting; both axes are logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, pane = pyplot.subplots(figsize=(7.2, 3.4))
    pane.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    for acceptance, colour in COLOURS.items():
        of_rate = [judged for judged in marks if judged.acceptance == acceptance]
        clients = [judged.clients for judged in of_rate]
        pane.plot(
            clients, [judged.outrider for judged in of_rate], "o", color=colour, markersize=6, label=_label(acceptance)
        )
        hollow: dict[str, Any] = {"color": colour, "markersize": 10, "markerfacecolor": "none", "alpha": 0.6}
        pane.plot(clients, [judged.best_fixed for judged in of_rate], "o", **hollow)
    pane.plot([], [], "o", color="black", markersize=10, markerfacecolor="none", label="best fixed setting")
    pane.set(
        xscale="log", yscale="log", xlabel="concurrent requests", ylabel="plain latency / latency (higher is better)"
    )
    pane.set_xticks(CONCURRENCY, labels=map(str, CONCURRENCY))
    pane.set_yticks(SPEEDUPS, labels=map(str, SPEEDUPS))
    pane.minorticks_off()
    pane.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _label(acceptance: str) -> str:
    return "Outrider, acceptance as recorded" if acceptance == "recorded" else f"Outrider, acceptance {acceptance}"


def main() -> None:
    points = json.loads(RESULTS.read_text())["points"]
    draw([mark(point["point"], point["latencyS"]) for point in points], PICTURE)
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
