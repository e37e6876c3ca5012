"""What came of it: a table on the terminal, a document and a plot in a folder."""

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
    """What is simulated and how its step times came about, before any figure."""
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
    said = [
        f"{one.name} "
        + ("as recorded" if shares.get(one.name) is None else f"lifted to {shares[one.name]:g} (synthetic)")
        for one in deployment.drafters
    ]
    return f"recorded from SmolLM2; {', '.join(said) or 'the pool is empty'} (--acceptance)"


def print_table(deployment: Deployment, found: Sequence[PolicyFigures], out: TextIO) -> None:
    """Then the crossover, where there are several rates."""
    classes = deployment.service.hot.slo_classes
    rows = [(*COLUMNS, *(f"{one.name} met" for one in classes)), *(_cells(one) for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    out.write("\n")
    for row in rows:
        cells = [
            cell.ljust(width) if at == 1 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        out.write("  ".join(cells).rstrip() + "\n")
    if found[0].rate_per_s != found[-1].rate_per_s:
        out.write(f"\n{crossover(found)}\n")


def _cells(one: PolicyFigures) -> tuple[str, ...]:
    p50_ms, p99_ms = 1e3 * one.tpot_p50_s, 1e3 * one.tpot_p99_s
    return (
        f"{one.rate_per_s:.3g}", one.policy, f"{one.goodput:.0f}", f"{one.latency_s:.2f} s", f"{one.speedup:.2f}x",
        f"{one.ttft_s:.2f} s", f"{p50_ms:.1f} ms", f"{p99_ms:.1f} ms", f"{one.verified:.2f}",
        *("-" if share is None else f"{share:.1%}" for share in one.attained),
    )  # fmt: skip


def write(folder: Path, deployment: Deployment, load: str, found: Sequence[PolicyFigures]) -> list[Path]:
    """`simulation.json`, and `simulation.png` where matplotlib is installed; the folder is there. Raises OSError."""
    world = deployment.world
    document = {
        "service": deployment.service.name, "target": deployment.service.target,
        "stepTimes": {"origin": world.origin, "source": world.source, "derived": list(world.derived)},
        "acceptance": dict(deployment.acceptance), "load": load, "notices": list(deployment.notices),
        "classes": [one.name for one in deployment.service.hot.slo_classes],
        "figures": [asdict(one) for one in found], "crossover": crossover(found),
    }  # fmt: skip
    path = folder / "simulation.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    picture = plot(folder / "simulation.png", deployment, found)
    return [path, picture] if picture else [path]
