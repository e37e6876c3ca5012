"""Writes results/<scenario>.json, its plot, and summary.json: what `make bench` leaves behind."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.analysis.bar import Bar
from tests.benchmarks.evidence.prompts import REPOSITORY
from tests.benchmarks.evidence.raw import engine_version

RESULTS = Path(__file__).parents[1] / "results"
SUMMARY = "summary"
DIGITS = 4


def read_result(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """What another benchmark wrote; None when it did not."""
    try:
        document: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return None
    return document


def write_document(name: str, document: object, folder: Path = RESULTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rounded(document), indent=1) + "\n")


def write_summary(bars: Sequence[Bar], about: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Entries of scenarios that have none among `bars` stay as they are: `ONLY=3` measures one scenario anew."""
    old = read_result(SUMMARY, folder) or {"measured": {}, "bars": []}
    new = {bar.scenario for bar in bars}
    kept = [entry for entry in old["bars"] if entry["scenario"] not in new]
    measured = {number: one for number, one in old["measured"].items() if int(number) not in new}
    document = {
        "measured": dict(sorted({**measured, **{str(number): dict(about) for number in new}}.items())),
        "bars": sorted([*kept, *(asdict(bar) for bar in bars)], key=lambda entry: entry["scenario"]),
    }
    write_document(SUMMARY, document, folder)


def machine() -> dict[str, Any]:
    """Where and with what it was measured."""
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "engine": engine_version(),
    }


def table(bars: Sequence[Bar]) -> str:
    """For the terminal."""
    return "\n".join(_line(bar) for bar in bars)


def rounded(value: Any) -> Any:
    """Four significant digits: a measurement has no more."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return value


def _line(bar: Bar) -> str:
    verdict = {True: "met   ", False: "MISSED", None: "  ?   "}[bar.met]
    ratio = "-" if bar.ratio is None else f"{bar.ratio:.3g}"
    interval = "" if bar.interval is None else f" [{bar.interval[0]:.3g}, {bar.interval[1]:.3g}]"
    bound = f"{'>=' if bar.at_least else '<='} {bar.bound:g}"
    return f"{bar.scenario}  {verdict} {ratio}{interval} {bound}  {bar.bar}: {bar.baseline or '-'}  {bar.note}".rstrip()


def _commit() -> str:
    """Of the checkout; with "+" where files that git tracks were changed."""
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"], cwd=REPOSITORY, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
