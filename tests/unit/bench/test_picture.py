"""The README's picture shows the judge's own figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.virtual_clock.picture import RESULTS, draw, mark


def test_mark_is_the_near_worst_seed_of_each_ratio() -> None:
    latency_s = {"plain": [2.0, 2.0], "ours": [1.0, 1.6], "best static": [1.25, 1.25]}
    point_mark = mark("llama-3.1-8b-h200, 0.7, eagle + lookup, 32 requests", latency_s)
    assert (point_mark.clients, point_mark.acceptance, point_mark.best_fixed) == (32, "0.7", 1.6)
    assert point_mark.outrider == pytest.approx(1.25 + 0.05 * 0.75)


def test_picture_has_every_judged_point(tmp_path: Path) -> None:
    marks = [mark(point["point"], point["latencyS"]) for point in json.loads(RESULTS.read_text())["points"]]
    assert {entry.clients for entry in marks} >= {1, 128}
    draw(marks, tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
