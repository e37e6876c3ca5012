"""A workload: arrival times, lengths and classes, as columns over requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import NO_CLASS
from outrider_runtime.simulate.recording import Recording

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    at_s: Floats
    """(R,): arrival times, ascending; in a closed load, the earliest time at which a client may send the request."""
    prompt: Ints
    """(R,): prompt tokens."""
    output: Ints
    """(R,): output tokens."""
    slo_class: Ints
    """(R,): position in the policy's SLO classes, or `NO_CLASS`."""
    answer: Ints
    """(R,): answer of the recording that the request gets."""
    clients: int | None = None
    """Number of clients of a closed load, each of which sends a request when its last one is answered; None: open."""

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and answers: log-normal around a median."""

    prompt: int = 500
    output: int = 128
    spread: float = 0.3

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        factor = np.exp(self.spread * rng.standard_normal((2, count)))
        prompt, output = (np.array([[self.prompt], [self.output]]) * factor).astype(np.int64)
        return np.maximum(prompt, 1), np.maximum(output, 1)


def draw_answers(recording: Recording, group: str | None, count: int, rng: np.random.Generator) -> Ints:
    """Draw answers of one group of prompts, or of all."""
    fits = np.arange(recording.answers)
    if group is not None:
        fits = fits[recording.group == recording.groups.index(group)]
    return np.asarray(rng.choice(fits, count), np.int64)


def draw_closed_load(
    clients: int, count: int, recording: Recording, group: str | None, rng: np.random.Generator,
    lengths: Lengths = Lengths(),
) -> Workload:  # fmt: skip
    """Draw `count` requests of a closed load. First requests are cut at random, so that clients do not align."""
    prompt, output = lengths.draw(count, rng)
    output[:clients] = np.maximum(8, (output[:clients] * rng.uniform(0.1, 1.0, min(clients, count))).astype(np.int64))
    no_class = np.full(count, NO_CLASS, np.int64)
    return Workload(np.zeros(count), prompt, output, no_class, draw_answers(recording, group, count, rng), clients)


def open_load(
    at_s: Floats, recording: Recording, group: str | None, rng: np.random.Generator, lengths: Lengths = Lengths()
) -> Workload:
    prompt, output = lengths.draw(len(at_s), rng)
    no_class = np.full(len(at_s), NO_CLASS, np.int64)
    return Workload(at_s, prompt, output, no_class, draw_answers(recording, group, len(at_s), rng))


def poisson(rate_per_s: float, count: int, rng: np.random.Generator) -> Floats:
    """(count,): arrival times of a Poisson process."""
    return np.asarray(np.cumsum(rng.exponential(1 / rate_per_s, count)))


def draw_classes(load: Workload, shares: Floats, rng: np.random.Generator) -> Workload:
    """Draw the SLO class of each request. shares: (classes,), with sum 1."""
    return replace(load, slo_class=np.asarray(rng.choice(len(shares), len(load), p=shares), np.int64))
