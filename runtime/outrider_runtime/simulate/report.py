"""Writes the results: a table on the terminal, a document and a plot in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from outrider_runtime.simulate.comparison import PolicyFigures, crossover
from outrider_runtime.simulate.plot import plot
from outrider_runtime.simulate.simulated_deployment import Deployment

COLUMNS = ("req/s", "policy", "tokens/s", "latency", "speed-up", "TTFT", "TPOT p50", "p99", "verified")


def print_setting(deployment: Deployment, load: str, out: TextIO) -> None:
    """Print what is simulated, and where its step times come from."""
    service, world = deployment.service, deployment.world
    lines = [
        f"{service.name}: {service.target} on {world.gpus} x {world.device}",
        f"step times ({world.origin}): {world.source}",
        *(f"  derived: {sentence}" for sentence in world.derived),
        f"proposals: {_proposals(deployment)}",
        f"load: {load}",
        *(f"note: {notice}" for notice in deployment.notices),
    ]
    out.writelines(f"{line}\n" for line in lines)


def _proposals(deployment: Deployment) -> str:
    shares = deployment.acceptance
    sources = [
        f"{drafter.name} "
        + ("as recorded" if shares.get(drafter.name) is None else f"lifted to {shares[drafter.name]:g} (synthetic)")
        for drafter in deployment.drafters
    ]
    return f"recorded from SmolLM2; {', '.join(sources) or 'the pool is empty'} (--acceptance)"


def print_table(deployment: Deployment, figures: Sequence[PolicyFigures], out: TextIO) -> None:
    """Print the figures, and the crossover if there are several rates."""
    classes = deployment.service.hot.slo_classes
    rows = [(*COLUMNS, *(f"{slo_class.name} met" for slo_class in classes)), *(_cells(row) for row in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    out.write("\n")
    for row in rows:
        cells = [
            cell.ljust(width) if at == 1 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        out.write("  ".join(cells).rstrip() + "\n")
    if figures[0].rate_per_s != figures[-1].rate_per_s:
        out.write(f"\n{crossover(figures)}\n")


def _cells(row: PolicyFigures) -> tuple[str, ...]:
    p50_ms, p99_ms = 1e3 * row.tpot_p50_s, 1e3 * row.tpot_p99_s
    return (
        f"{row.rate_per_s:.3g}", row.policy, f"{row.goodput:.0f}", f"{row.latency_s:.2f} s", f"{row.speedup:.2f}x",
        f"{row.ttft_s:.2f} s", f"{p50_ms:.1f} ms", f"{p99_ms:.1f} ms", f"{row.verified:.2f}",
        *("-" if share is None else f"{share:.1%}" for share in row.attained),
    )  # fmt: skip


def write(folder: Path, deployment: Deployment, load: str, figures: Sequence[PolicyFigures]) -> list[Path]:
    """Write `simulation.json` to an existing folder, and `simulation.png` with matplotlib. Raises OSError."""
    world = deployment.world
    document = {
        "service": deployment.service.name, "target": deployment.service.target,
        "stepTimes": {"origin": world.origin, "source": world.source, "derived": list(world.derived)},
        "acceptance": dict(deployment.acceptance), "load": load, "notices": list(deployment.notices),
        "classes": [slo_class.name for slo_class in deployment.service.hot.slo_classes],
        "figures": [asdict(row) for row in figures], "crossover": crossover(figures),
    }  # fmt: skip
    path = folder / "simulation.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    picture = plot(folder / "simulation.png", deployment, figures)
    return [path, picture] if picture else [path]
