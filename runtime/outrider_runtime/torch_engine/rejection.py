"""Rejection sampling of chains that were drawn from a drafter's distribution (Leviathan et al. 2023, algorithm 1; Chen
et al. 2023, algorithm 2). It accepts each token as often as any exact method can that judges one at a time, and answers
follow the target's distribution.

Exact as long as nothing that is decided hangs on a token that was drawn: how long the chain is, how much of it is
verified, whose it is. So its nodes have no confidences, and what is merged with another drafter's is left to `walk`.
One way is open: a beam of an earlier step is drawn with the target's noise of places to come, and its confidences may
reach the length of a later chain through what SLO classes need.
Shapes: M rows of all chains, k + 1 of each; V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider_runtime.torch_engine.seeded_noise import Noise, uniform
from outrider_runtime.torch_engine.token_sampling import Row, draw

NOTHING = -1


class Chain(NamedTuple):
    """k proposals that are verified."""

    row: int
    """The first of its k + 1 rows among the step's: behind the request's last token, and behind each proposal."""
    tokens: Sequence[int]
    drawn_from: Sequence[Tensor]
    """(V,) each: the probabilities that the token comes from."""

    @property
    def rows(self) -> range:
        return range(self.row, self.row + len(self.tokens) + 1)


def judge(chains: Sequence[Chain], weights: Tensor, rows: Sequence[Row], tokens: Sequence[int]) -> list[int]:
    """`tokens` with those of the chains' rows: the proposal, where it is accepted, or what is drawn instead; behind one
    that is not accepted they mean nothing. weights: as `weights_of` makes them of the target's logits, of all rows."""
    judged = list(tokens)
    if chains:
        numbers = [number for chain in chains for number in chain.rows]
        for number, token in zip(numbers, _judge(chains, weights[numbers], [rows[n] for n in numbers]), strict=True):
            judged[number] = token
    return judged


def _judge(chains: Sequence[Chain], weights: Tensor, rows: Sequence[Row]) -> list[int]:
    wanted = weights.softmax(-1)  # (M, V): p
    none = torch.zeros_like(wanted[0])
    drawn_from = torch.stack([one for chain in chains for one in (*chain.drawn_from, none)])  # (M, V): q
    proposed = [token for chain in chains for token in (*chain.tokens, NOTHING)]
    others = draw((wanted - drawn_from).clamp(min=0).log(), rows)  # norm(max(0, p - q)); the bonus token from p
    at = torch.tensor(proposed, device=weights.device).clamp(min=0)[:, None]
    seeds = [row.sampling.seed + Noise.ACCEPTANCE for row in rows]
    luck = uniform(seeds, [row.place for row in rows], 1, weights.device)
    accepted = (luck * drawn_from.gather(1, at) < wanted.gather(1, at)).flatten().tolist()
    return [
        token if holds and token != NOTHING else other
        for token, holds, other in zip(proposed, accepted, others, strict=True)
    ]
