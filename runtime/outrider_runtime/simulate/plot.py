"""The runs as a picture: latencies, and what each policy did over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider_runtime.simulate.run import Run


def plot(runs: Sequence[Run], title: str, duration_s: float, path: Path) -> Path | None:
    """None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:  # not part of the runtime image
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for run in runs:
        _latencies(axes[0], run)
        _over_time(axes[1], axes[2], run)
    axes[0].set(xscale="log", xlabel="request latency, s", ylabel="share of requests", title="latency")
    axes[0].xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes[0].xaxis.set_major_formatter("{x:g}")
    axes[0].xaxis.set_minor_formatter(ticker.NullFormatter())
    axes[1].set(xlabel="time, s", ylabel="proposals verified a step", title="verification length")
    axes[2].set(xlabel="time, s", ylabel="requests in a step", title="batch")
    for axis in axes[1:]:
        axis.axvline(duration_s, color="grey", linewidth=0.8, linestyle=":")  # no request comes after it
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _latencies(axis: Any, run: Run) -> None:
    latencies = np.sort([one.latency_s for one in run.finished])
    shares = np.arange(1, len(latencies) + 1) / max(1, len(latencies))
    axis.step(latencies, shares, where="post", label=run.figures.policy)


def _over_time(lengths: Any, batches: Any, run: Run) -> None:
    slices = run.observer.timeline
    ends = (np.arange(len(slices)) + 1) * run.observer.bin_s
    lengths.plot(ends, [one.verified_length for one in slices], linewidth=1)
    batches.plot(ends, [one.batch for one in slices], linewidth=1)
