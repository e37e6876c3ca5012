"""Error of the profiles that the loop mounts against the worlds' own step times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.step_times import Shape
from outrider_runtime.simulate.worlds.world import Pass

from bench.replay.settings import LONGEST, Case, pool, profile, world

REQUESTS, CONTEXT = (1, 3, 6, 12, 24, 48, 96), 600
"""Sizes between those of the profile."""


def documents(worlds: Sequence[str]) -> dict[str, object]:
    """Return the errors by world and part."""
    return {name: document(name) for name in worlds}


def document(name: str) -> dict[str, object]:
    """Return median and largest of predicted / true seconds - 1, for steps of the target and for each drafter."""
    rows = {"target": list(_steps(name))} | {
        drafter.name: list(_drafts(name, drafter.name)) for drafter in pool(Case(name))
    }
    return {
        part: {
            "medianErrorPercent": _percent(np.median(np.abs(errors))),
            "worstErrorPercent": _percent(_largest(errors)),
        }
        for part, errors in rows.items()
    }


def _steps(name: str) -> Iterator[float]:
    hardware, cost = world(name), profile(name, pool(Case(name)), 0).target[ExecutionMode.UNIFORM]
    for requests in REQUESTS:
        for tokens in range(requests, (1 + LONGEST) * requests + 1, requests):
            seconds = hardware.target_s(Pass(tokens, requests, CONTEXT, tokens))
            yield cost.seconds(_shape(requests, tokens)) / seconds - 1


def _drafts(name: str, drafter: str) -> Iterator[float]:
    hardware, cost = world(name), profile(name, pool(Case(name)), 0).drafters[drafter]
    for requests in REQUESTS:
        for passes in range(1, 1 + LONGEST):
            seconds = hardware.draft_s(drafter, Pass(requests, requests, CONTEXT, requests), passes)
            yield cost.seconds(_shape(requests, requests), passes) / seconds - 1


def _shape(requests: int, tokens: int) -> Shape:
    return Shape(requests * CONTEXT, tokens, requests, CONTEXT * tokens / 1000)


def _largest(errors: list[float]) -> float:
    return max(errors, key=abs)


def _percent(error: float) -> float:
    return round(100 * float(error), 1)
