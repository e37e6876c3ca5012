"""Loads with phases: arrivals and prompts that change, and the speed at which each phase is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_answers, open_load

from bench.replay.settings import Case, case_recording

LENGTHS = Lengths(300, 128)
DONE = 0.95
"""Share of the requests that ends a phase's measurement: the last few run in a batch that empties."""


@dataclass(frozen=True, slots=True)
class Phase:
    seconds: float
    rate_per_s: float
    group: str | None = None
    overloaded: bool = False
    """Whether more arrives than can be served. Goodput is compared then: latency depends on the phase's length."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A load in phases."""

    name: str
    case: Case
    phases: tuple[Phase, ...]
    arrivals_s: tuple[float, ...] | None = None
    """Arrival times of a trace; None: Poisson at each phase's rate."""

    def ends_s(self) -> NDArray[np.float64]:
        return np.cumsum([phase.seconds for phase in self.phases])

    def shares(self) -> NDArray[np.float64]:
        """Return (phases,): shares of the requests that are expected in each phase."""
        weight = np.array([phase.seconds * phase.rate_per_s for phase in self.phases])
        return np.asarray(weight / weight.sum())


class Times(Protocol):
    """(R,) each: when a request came, and when its last token did."""

    @property
    def arrived_s(self) -> NDArray[np.float64]: ...
    @property
    def done_s(self) -> NDArray[np.float64]: ...


def load(shift: Shift, seed: int) -> Workload:
    """Draw the arrivals, with prompts of each phase's group."""
    rng = np.random.default_rng([seed, 11])
    at_s = np.array(shift.arrivals_s) if shift.arrivals_s is not None else _poisson(shift, rng)
    real = case_recording(shift.case)
    phase = _find_phases(shift, at_s)
    answers = np.zeros(len(at_s), np.int64)
    for number, shift_phase in enumerate(shift.phases):
        answers[phase == number] = draw_answers(real, shift_phase.group, int((phase == number).sum()), rng)
    made = open_load(at_s, real, None, rng, LENGTHS)
    return Workload(made.at_s, made.prompt, made.output, made.slo_class, answers)


def _poisson(shift: Shift, rng: np.random.Generator) -> NDArray[np.float64]:
    times, start = [], 0.0
    for phase in shift.phases:
        count = int(rng.poisson(phase.rate_per_s * phase.seconds))
        times.append(start + np.sort(rng.uniform(0, phase.seconds, count)))
        start += phase.seconds
    return np.concatenate(times)


def _find_phases(shift: Shift, at_s: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.asarray(np.searchsorted(shift.ends_s(), at_s, side="right").clip(0, len(shift.phases) - 1), np.int64)


def speeds(shift: Shift, load: Workload, result: Times) -> NDArray[np.float64]:
    """Return (phases,): 1 / mean latency of the requests that arrived in a phase (higher is better).

    In an overloaded phase it is their tokens / seconds from the phase's start until DONE of them are answered. Without
    requests it is 1.
    """
    phase, phase_speeds = _find_phases(shift, result.arrived_s), np.ones(len(shift.phases))
    latency, starts = (
        result.done_s - result.arrived_s,
        shift.ends_s() - [shift_phase.seconds for shift_phase in shift.phases],
    )
    for number, shift_phase in enumerate(shift.phases):
        in_phase = phase == number
        if in_phase.any() and shift_phase.overloaded:
            phase_speeds[number] = load.output[in_phase].sum() / (
                np.quantile(result.done_s[in_phase], DONE) - starts[number]
            )
        elif in_phase.any():
            phase_speeds[number] = 1 / latency[in_phase].mean()
    return phase_speeds
