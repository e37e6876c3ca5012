"""Plots speed-up and SLO attainment by rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider_runtime.simulate.comparison import OURS, PLAIN, PolicyFigures
from outrider_runtime.simulate.simulated_deployment import Deployment


def plot(path: Path, deployment: Deployment, figures: Sequence[PolicyFigures]) -> Path | None:
    """Draw the plot; returns None if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for policy in dict.fromkeys(row.policy for row in figures):
        own = [row for row in figures if row.policy == policy]
        width = 2.2 if policy == OURS else 1.0
        left.plot([row.rate_per_s for row in own], [row.speedup for row in own], "o-", label=policy, linewidth=width)
    left.set(xlabel="requests a second", ylabel="latency of plain decoding / latency", title="speed-up")
    left.legend(fontsize="small")
    for number, slo_class in enumerate(deployment.service.hot.slo_classes):
        for policy, style in ((OURS, "o-"), (PLAIN, "o:")):
            own = [row for row in figures if row.policy == policy and row.attained[number] is not None]
            right.plot(
                [row.rate_per_s for row in own], [row.attained[number] for row in own], style,
                color=f"C{number}", label=f"{slo_class.name}, {policy}",
            )  # fmt: skip
    right.set(xlabel="requests a second", title="share of requests that met their class", ylim=(-0.05, 1.05))
    if deployment.service.hot.slo_classes:
        right.legend(fontsize="small")
    figure.suptitle(f"{deployment.service.name} on {deployment.world.gpus} x {deployment.world.device}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
