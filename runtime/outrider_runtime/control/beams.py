"""What a wider beam offers a request: how likely the target's token is at each place of it.

Shapes: D drafters, N requests, K depths, W places at a depth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.batch import Floats, Ints
from outrider_runtime.control.compiled import compiled

LEAST_DOUBT = 1e-9


class Beams(NamedTuple):
    """What the drafters' beams offer for the next step."""

    places: Floats
    """(D, K, W): how often the target's token is at each place of a depth, given that it was in the beam before."""
    hazards: Floats
    """(D, K): of chains."""
    widest: Ints
    """(D,); 1: chains only."""


def chains_only(drafters: int, depths: int) -> Beams:
    return Beams(np.ones((drafters, depths, 1)), np.zeros((drafters, depths)), np.ones(drafters, np.int64))


@compiled
def place_rates(chains: Floats, places: Floats, hazards: Floats) -> Floats:
    """(K, W, N): how likely the target's token is at each place of a request's beam, given that it was in the beam
    before. A request differs from the others as its chains (K, N) do; 0 where it has no room."""
    depths, requests = chains.shape
    rates = np.zeros((depths, places.shape[1], requests))
    for i in range(requests):
        factor = chains[0, i] / (1.0 - chains[0, i]) * (1.0 - hazards[0]) / hazards[0]
        for k in range(depths):
            if chains[k, i] <= 0.0:
                break
            doubt = max(LEAST_DOUBT, 1.0 - places[k, 0])
            odds = places[k, 0] / doubt * factor
            rates[k, 0, i] = odds / (1.0 + odds)
            for w in range(1, places.shape[1]):
                rates[k, w, i] = places[k, w] / doubt * (1.0 - rates[k, 0, i])
    return rates


@compiled
def most_gained(paths: Floats, beams: Beams) -> Floats:
    """(N,): the most tokens beyond the bonus token that any drafter is expected to bring. paths: (D, K, N)."""
    drafters, depths, requests = paths.shape
    most = np.zeros(requests)
    for d in range(drafters):
        widest = beams.widest[d]
        rates = place_rates(paths[d], beams.places[d], beams.hazards[d]) if widest > 1 else paths[:0]
        for i in range(requests):
            gain, beam, reach = paths[d, :, i].sum(), 0.0, 1.0
            for k in range(depths if widest > 1 else 0):
                reach *= rates[k, :widest, i].sum()
                beam += reach
            most[i] = max(most[i], gain, beam)
    return most
