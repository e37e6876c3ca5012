"""Rejection sampling of chains that were drawn from a drafter's distribution q, for a target distribution p
(Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2):

    P(accept x) = min(1, p(x) / q(x)); after a rejection, draw from norm(max(0, p - q))

No exact method that judges one token at a time accepts more, and answers follow the target's distribution.

That holds as long as no decision depends on a drawn token: the chain's length, the part that is verified, the choice of
its drafter. So the nodes of such a chain have no confidences, and a chain that is merged with another drafter's
proposals is left to `commit.walk`. One dependence remains: a beam of an earlier step uses the target's noise for later
positions. Its confidences may change the length of a later chain, through the needs of SLO classes.
Shapes: M rows of all chains, k + 1 for each chain; V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider_runtime.torch_engine.seeded_noise import Noise, uniform
from outrider_runtime.torch_engine.token_sampling import Row, draw

NO_PROPOSAL = -1
"""Stands for the proposal of the last row of a chain, from which the bonus token is drawn."""


class Chain(NamedTuple):
    """The k proposals of one request that are verified."""

    row: int
    """The first of the chain's k + 1 rows in the step: after the request's last token, then after each proposal."""
    tokens: Sequence[int]
    drawn_from: Sequence[Tensor]
    """(V,) each: the probabilities q that the token was drawn with."""

    @property
    def rows(self) -> range:
        return range(self.row, self.row + len(self.tokens) + 1)


def judge(chains: Sequence[Chain], weights: Tensor, rows: Sequence[Row], tokens: Sequence[int]) -> list[int]:
    """Replace the tokens of the chains' rows: by the proposal if it is accepted, otherwise by a draw from the rest.

    Tokens after a rejected proposal have no meaning. weights: (R, V), from `weights_of`, for all rows of the step.
    tokens: the target's own draw for each row.
    """
    judged = list(tokens)
    if chains:
        numbers = [number for chain in chains for number in chain.rows]
        for number, token in zip(numbers, _judge(chains, weights[numbers], [rows[n] for n in numbers]), strict=True):
            judged[number] = token
    return judged


def _judge(chains: Sequence[Chain], weights: Tensor, rows: Sequence[Row]) -> list[int]:
    """Judge the chains' rows alone. weights: (M, V)."""
    p = weights.softmax(-1)  # (M, V)
    no_draft = torch.zeros_like(p[0])  # (V,)
    q = torch.stack([row for chain in chains for row in (*chain.drawn_from, no_draft)])  # (M, V)
    proposals = [token for chain in chains for token in (*chain.tokens, NO_PROPOSAL)]
    residual_draws = draw((p - q).clamp(min=0).log(), rows)  # from norm(max(0, p - q)); the bonus token from p
    columns = torch.tensor(proposals, device=weights.device).clamp(min=0)[:, None]  # (M, 1)
    seeds = [row.sampling.seed + Noise.ACCEPTANCE for row in rows]
    u = uniform(seeds, [row.place for row in rows], 1, weights.device)  # (M, 1)
    accepted = (u * q.gather(1, columns) < p.gather(1, columns)).flatten().tolist()  # u < p / q
    return [
        proposal if is_accepted and proposal != NO_PROPOSAL else residual_draw
        for proposal, is_accepted, residual_draw in zip(proposals, accepted, residual_draws, strict=True)
    ]
