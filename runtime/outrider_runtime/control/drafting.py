"""What a choice of drafters and draft length rests on, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.choice import TargetPrice
from outrider_runtime.control.slo import Clocks

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOBODY = -1
"""In place of a drafter's number: nothing is proposed for the request."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Requests that are behind their TPOT and can still make it, as the step that is priced begins."""

    clocks: Clocks
    behind: Bools
    """(N,)"""
    step_s: float
    """What a step takes at present."""


@dataclass(frozen=True, slots=True)
class DraftProblem:
    """All that a choice of drafters and draft length rests on. D drafters, N decoding requests, K positions."""

    gains: Floats
    """(D, K, N): products of hazards; 0 past a request's room."""
    offers: Floats
    """(D, K, N): probability that the drafter has a proposal there."""
    usable: Bools
    """(D, N)"""
    neural: int
    """Number of the neural drafter, or NOBODY."""
    draft_s: Floats
    """(D, K+1): the drafter's seconds for each draft length; column 0 is not used."""
    query_costs_s: Floats
    """(N,): what a verified token costs for its request's context."""
    neural_token_s: float
    """What it costs in the neural draft's first pass, which covers every token of the target's step."""
    price: TargetPrice
    rate: float
    """lambda, tokens per second."""
    budget: int
    pressure: Pressure | None = None
    """None: nobody is behind."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    draft_tokens: int
    """The longest of any drafter."""
    neural_tokens: int
    """Of the neural drafter, whose every token costs a pass; 0 where it proposes nothing."""
    drafters: Ints
    """(N,): drafter numbers, or NOBODY."""
    value: float
    """`E[tokens] - lambda * T_step`, bonus tokens left out."""
    plain_value: float
    """The same for k = 0."""
    for_slo: bool = False
    """Goodput alone might have chosen otherwise."""
    paying: Ints | None = None
    """(D, N): how many of each drafter's proposals are worth verifying whatever the others are; None: not known."""
    perhaps_paying: Ints | None = None
    """(D, N): how many may be, if the others are few; None: no more than `paying`."""

    @property
    def gain(self) -> float:
        """Expected tokens that speculation is worth in this step; 0 when k = 0 is the choice."""
        return self.value - self.plain_value


def nobody(requests: int, plain_value: float, *, for_slo: bool = False) -> DraftChoice:
    """k = 0."""
    return DraftChoice(0, 0, np.full(requests, NOBODY), plain_value, plain_value, for_slo)
