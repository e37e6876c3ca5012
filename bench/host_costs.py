"""Host time of an engine step by batch, as `bench.host_step` measured it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

MEASURED = Path(__file__).parent / "results" / "host_step.json"
PLAIN, SPECULATING, LOOP = "plain", "speculating", "loop"
"""Stock vLLM without drafts and with them, and vLLM with the loop."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of vLLM's two calls of a step; linear between the measured batches, constant beyond them."""

    requests: tuple[int, ...]
    schedule_s: tuple[float, ...]
    update_s: tuple[float, ...]

    def schedule(self, requests: int) -> float:
        return float(np.interp(requests, self.requests, self.schedule_s))

    def update(self, requests: int) -> float:
        return float(np.interp(requests, self.requests, self.update_s))


def host_costs(drafters: Collection[str], system: str) -> HostCosts:
    rows = _rows(_pool(drafters))
    schedule_s, update_s = (tuple(row[system][f"{part}_us"] / 1e6 for row in rows) for part in ("schedule", "update"))
    return HostCosts(tuple(row["requests"] for row in rows), schedule_s, update_s)


def added_us(drafters: Collection[str], part: str = "loop_us") -> tuple[tuple[int, float], ...]:
    """Read the microseconds that the loop adds to a step, by batch. part: `stepper_us` in engines other than vLLM."""
    return tuple((row["requests"], row[part]) for row in _rows(_pool(drafters)))


def _pool(drafters: Collection[str]) -> str:
    """Choose the measured pool that stands for these drafters: bookkeeping for a draft model costs most."""
    return "lookup, draft model" if "draft" in drafters else "lookup, head"


@cache
def _rows(pool: str) -> tuple[dict[str, Any], ...]:
    rows = [row for row in json.loads(MEASURED.read_text())["rows"] if row["pool"] == pool]
    return tuple(sorted(rows, key=lambda row: int(row["requests"])))
