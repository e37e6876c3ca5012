"""The runs for people: a table on the terminal, JSON in a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from outrider_runtime.simulate.assumptions import Acceptance
from outrider_runtime.simulate.observer import Observer
from outrider_runtime.simulate.plot import plot
from outrider_runtime.simulate.pod import Pod
from outrider_runtime.simulate.run import Run
from outrider_runtime.simulate.summary import RunFigures

_COLUMNS = (
    "policy", "goodput", "latency", "p95", "TTFT", "TPOT p50", "p99", "SLO met", "batch", "verified", "requests",
)  # fmt: skip
_UNITS = ("", "tokens/s", "mean s", "s", "mean s", "ms", "ms", "", "mean", "a step", "")


def print_setting(pod: Pod, workload: str, acceptance: Acceptance, out: TextIO) -> None:
    """What is simulated, its label first: no figure is read without it."""
    profile = pod.profile
    out.write(f"profile   {profile.name} ({profile.label}): {profile.target} on {profile.hardware}; {profile.source}\n")
    limits = pod.limits
    cache = f"{limits.kv_tokens:,} KV tokens" if profile.kv_tokens else "unlimited KV memory"
    names = ", ".join(f"{drafter.name} ({drafter.method.value})" for drafter in pod.drafters) or "no drafter"
    out.write(f"pod       {pod.service}: {names}; up to {pod.max_draft_tokens} draft tokens, {cache}, ")
    out.write(f"{limits.max_requests} requests and {limits.token_budget} tokens a step\n")
    out.write(f"load      {workload}\n")
    out.writelines(f"accepted  {line}\n" for line in acceptance.lines())
    out.writelines(f"note      {notice}\n" for notice in pod.notices)


def print_table(runs: Sequence[Run], label: str, out: TextIO) -> None:
    """One row a policy, then each class's attainment where there are several."""
    rows = [_COLUMNS, _UNITS, *(tuple(_cells(run.figures)) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    out.write(f"\nsimulated, with a {label} profile\n")
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        out.write("  ".join([row[0].ljust(len(first)), *rest]).rstrip() + "\n")
    out.writelines(f"{line}\n" for run in runs for line in _remarks(run.figures))


def _cells(figures: RunFigures) -> Iterator[str]:
    yield figures.policy
    yield f"{figures.tokens_per_s:.0f}"
    yield from (f"{seconds:.2f}" for seconds in (figures.latency_mean_s, figures.latency_p95_s, figures.ttft_mean_s))
    yield from (f"{seconds * 1e3:.1f}" for seconds in (figures.tpot_p50_s, figures.tpot_p99_s))
    yield "-" if figures.attainment is None else f"{figures.attainment:.1%}"
    yield f"{figures.mean_batch:.1f}"
    yield f"{figures.mean_verified_length:.2f}"
    yield f"{figures.requests}"


def _remarks(figures: RunFigures) -> Iterator[str]:
    used = [one for one in figures.classes if one.requests]
    if len(used) > 1:
        shares = (f"{one.name} {one.attained / one.requests:.1%} of {one.requests}" for one in used)
        yield f"  {figures.policy}: SLO met: {', '.join(shares)}"
    if len(figures.drafter_shares) > 1:
        shares = (f"{name} in {share:.0%}" for name, share in figures.drafter_shares.items())
        yield f"  {figures.policy}: used {', '.join(shares)} of the steps of decoding requests"
    if figures.refused:
        yield f"  {figures.policy}: refused {figures.refused} requests that are too long for this pod"


def write_report(
    folder: Path, pod: Pod, setting: dict[str, Any], runs: Sequence[Run], duration_s: float
) -> Iterable[Path]:
    """`simulation.json`, and `simulation.png` where matplotlib is installed; the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "profile": pod.profile.wire(),
        "label": pod.profile.label.value,
        **setting,
        "notices": list(pod.notices),
        "runs": [{**run.figures.as_json(), "timeline": _timeline(run.observer)} for run in runs],
    }
    path = folder / "simulation.json"
    path.write_text(json.dumps(_without_nan(document), indent=2) + "\n", encoding="utf-8")
    title = f"{pod.service}, profile {pod.profile.name} ({pod.profile.label})"
    plotted = plot(runs, title, duration_s, folder / "simulation.png")
    return [path, *([plotted] if plotted else [])]


def _timeline(observer: Observer) -> list[dict[str, float]]:
    return [
        {
            "endS": round((position + 1) * observer.bin_s, 4),
            "tokensPerS": round(one.tokens / observer.bin_s, 2),
            "batch": round(one.batch, 3),
            "verifiedLength": round(one.verified_length, 4),
        }
        for position, one in enumerate(observer.timeline)
    ]


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: a figure that no request gave is null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
