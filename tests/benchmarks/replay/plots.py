"""Pictures of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def static_plot(found: dict[str, Any], path: Path) -> None:
    """Goodput by that of plain decoding: ours, the best static setting of each point, adaptive verification."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = sorted({one["world"] for one in found["static"]})
    figure, panes = pyplot.subplots(1, max(1, len(names)), figsize=(3.4 * max(1, len(names)), 3.4), squeeze=False)
    for pane, name in zip(panes[0], names, strict=False):
        here = sorted((one for one in found["static"] if one["world"] == name), key=lambda one: one["requests"])
        for label, style in (("ours", "o-"), ("best", "s--"), ("adaptive verification", "^:")):
            at = sorted({one["requests"] for one in here})
            pane.plot(at, [_ratio(here, requests, label) for requests in at], style, label=label)
        pane.axhline(1.0, color="grey", linewidth=0.8)
        pane.set(title=name, xscale="log", xlabel="requests at a time")
    panes[0][0].set_ylabel("goodput by that of plain decoding")
    panes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _ratio(here: list[dict[str, Any]], requests: int, label: str) -> float:
    """Geometric mean over recordings."""
    ratios = [
        np.mean(one["goodput"][one["best"] if label == "best" else label]) / np.mean(one["goodput"]["plain"])
        for one in here
        if one["requests"] == requests
    ]
    return float(np.exp(np.mean(np.log(ratios))))
