"""How long what is left will take, so that a user knows before it starts. Pure.

An estimate for a quiet machine of two cores, from what a run took there; not a promise.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.benchmarks.evidence.plan import Calibration, Point, points
from tests.benchmarks.evidence.prompts import Data
from tests.benchmarks.evidence.scenario import Testbed
from tests.benchmarks.evidence.schedule import Round, Sitting

START_S = 32.0
"""A server's start and stop, beside others that are idle."""
WARM_UP_S = 5.0
DRAIN_S = 3.0
"""After the last arrival of an open load."""
PREPARATION_S = 390.0
"""Profile and calibration."""
TOKENS_PER_S = {1: 35.0, 4: 95.0, 16: 180.0, 48: 240.0}
"""By requests at the same time, prompts included, mean of the systems and groups."""
NOMINAL = Calibration(capacity_per_s=6.0, step_s_at_batch_8=0.045, work_us=100.0)


def seconds_left(left: Iterable[Sitting], testbed: Testbed, data: Data, stock: Calibration = NOMINAL) -> float:
    """Of all the sittings; 0.0 when nothing is left."""
    sat = [_sitting_s(one, testbed, data, stock) for one in left]
    return sum(sat) + PREPARATION_S if sat else 0.0


def _sitting_s(sitting: Sitting, testbed: Testbed, data: Data, stock: Calibration) -> float:
    measured = sum(_round_s(one, testbed, data, stock) for one in sitting.rounds)
    return len(sitting.systems) * (START_S + WARM_UP_S) + measured


def _round_s(one: Round, testbed: Testbed, data: Data, stock: Calibration) -> float:
    wanted = points(one.scenario, testbed, data, stock, one.repeat)
    return len(one.systems) * sum(_point_s(point, testbed.output_tokens) for point in wanted)


def _point_s(point: Point, output_tokens: int) -> float:
    if point.concurrency is not None:
        return len(point.requests) * output_tokens / _tokens_per_s(point.concurrency)
    return max((one.at_s or 0.0 for one in point.requests), default=0.0) + DRAIN_S


def _tokens_per_s(concurrency: int) -> float:
    """Of the known batch that is nearest from below."""
    known = [(size, speed) for size, speed in TOKENS_PER_S.items() if size <= concurrency]
    return known[-1][1]
