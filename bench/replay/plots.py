"""Pictures of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SHOWN = (
    ("ours", "o", "tab:blue"),
    ("adaptive verification", "^", "tab:orange"),
    ("table by batch size", "s", "tab:grey"),
)


def static_plot(figures: dict[str, Any], path: Path) -> None:
    """A mark a point of static load: goodput by that of plain decoding, against that of the best static setting."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, pane = pyplot.subplots(figsize=(6.4, 4.2))
    highest = max((_ratio(row, row["best"]) for row in figures["static"]), default=1.0)
    pane.plot([1, highest], [1, highest], color="black", linewidth=0.8, label="best static setting of each point")
    pane.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label="no speculation")
    for name, mark, colour in SHOWN:
        best = [_ratio(row, row["best"]) for row in figures["static"]]
        mine = [_ratio(row, name) for row in figures["static"]]
        pane.plot(
            best, mine, mark, color=colour, markersize=5, alpha=0.8, label=f"vLLM's {name}" if name != "ours" else name
        )
    pane.set(
        xlabel="goodput of the best static setting, by that of no speculation",
        ylabel="goodput, by that of no speculation",
    )
    pane.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _ratio(row: dict[str, Any], name: str) -> float:
    """Ratio of means over seeds."""
    return float(np.mean(row["goodput"][name]) / np.mean(row["goodput"]["plain"]))
