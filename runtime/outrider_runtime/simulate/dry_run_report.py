"""What a dry run found: a table on the terminal, a document and a plot in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from outrider_runtime.simulate.dry_run import Plan, Row, crossover


def print_setting(plan: Plan, out: TextIO) -> None:
    """How the world came about, before any figure."""
    world = plan.world
    print(f"{plan.service}: {world.model} on {world.gpus} x {world.device}", file=out)
    print(f"step times: {world.source}", file=out)
    for sentence in world.derived:
        print(f"  derived: {sentence}", file=out)
    print(f"drafters: {', '.join(drafter.name for drafter in plan.drafters)}", file=out)
    print(
        f"proposals: recorded from SmolLM2, lifted to an acceptance of {plan.acceptance:g} (synthetic; --lifted-to)",
        file=out,
    )
    for notice in plan.notices:
        print(f"note: {notice}", file=out)


def print_rows(plan: Plan, rows: Sequence[Row], out: TextIO) -> None:
    names = "".join(f"  {one.name} (plain)".rjust(24) for one in plan.classes)
    print(f"\n{'req/s':>8}{'tokens/s':>10}{'latency':>10}{'speed-up':>10}{'verified':>10}{names}", file=out)
    for row in rows:
        shares = "".join(
            f"{mine:.0%} ({theirs:.0%})".rjust(24)
            for mine, theirs in zip(row.attained, row.plain_attained, strict=True)
        )
        figures = f"{row.rate_per_s:8.1f}{row.goodput:10.0f}{row.latency_s:9.2f}s{row.speedup:9.2f}x"
        print(f"{figures}{row.draft_length:10.2f}{shares}", file=out)
    print(f"\n{crossover(rows)}", file=out)


def write(folder: Path, plan: Plan, rows: Sequence[Row]) -> list[Path]:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "service": plan.service, "world": plan.world.source, "derived": list(plan.world.derived),
        "acceptance": plan.acceptance, "rates": [asdict(row) for row in rows], "crossover": crossover(rows),
    }  # fmt: skip
    written = folder / "dry-run.json"
    written.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    picture = _plot(folder / "dry-run.png", plan, rows)
    return [written, picture] if picture else [written]


def _plot(path: Path, plan: Plan, rows: Sequence[Row]) -> Path | None:
    """None where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    at = [row.rate_per_s for row in rows]
    left.plot(at, [row.speedup for row in rows], "o-")
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(xlabel="requests a second", ylabel="latency of plain decoding by ours", title="speed-up")
    for number, one in enumerate(plan.classes):
        line = right.plot(at, [row.attained[number] for row in rows], "o-", label=one.name)[0]
        right.plot(at, [row.plain_attained[number] for row in rows], ":", color=line.get_color())
    right.set(xlabel="requests a second", title="SLO attainment (dotted: plain decoding)", ylim=(-0.05, 1.05))
    if plan.classes:
        right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
