"""The target's forward pass of a step: the tokens it runs over, and the token that it draws after each place.

A place is ROOT, the request's last known token, or a proposed node that the pass verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from outrider_runtime.control.plans import ROOT
from outrider_runtime.torch_engine.batch_scheduler import ScheduledRequest
from outrider_runtime.torch_engine.decoder import Decoder
from outrider_runtime.torch_engine.model_runner import Segment
from outrider_runtime.torch_engine.rejection import Chain, judge
from outrider_runtime.torch_engine.token_sampling import Row, compute_weights, describe_draw, draw
from outrider_runtime.torch_engine.tree import ancestors


class Drawn(NamedTuple):
    """One request's logits, and the tokens that were drawn from them."""

    logits: Tensor
    """(1 + chosen proposals, vocabulary)"""
    tokens: dict[int, int]
    """Place -> the token drawn after it: ROOT, then the chosen nodes, in the order of the logits' rows."""


def target_segment(scheduled: ScheduledRequest) -> Segment:
    """List the tokens that the target runs over for one request: known tokens, then the chosen proposals."""
    request = scheduled.request
    tokens = request.tokens[request.computed : request.computed + scheduled.known]
    if not scheduled.proposals:
        return Segment(request.name, tokens, request.computed)
    tree = request.proposals.only(request.chosen)
    parents = [ROOT, *(parent + 1 for parent in tree.parents)]  # node 0 is the last known token, the tree's ROOT
    return Segment(request.name, tokens + tree.tokens, request.computed, ancestors(parents))


def draw_tokens(step: Sequence[ScheduledRequest], last: Tensor, decoder: Decoder) -> list[Drawn | None]:
    """Draw a token after each place of each request; None for a request whose prefill is not complete.

    last: (T, H), the final hidden states of all tokens of the step.
    """
    token_numbers = list[int]()  # rows of `last` whose logits are needed
    rows = list[Row]()
    end = 0
    for scheduled in step:
        end += scheduled.tokens
        if scheduled.draws:
            token_numbers += range(end - 1 - scheduled.proposals, end)
            proposals = scheduled.request.proposals
            rows += [describe_draw(scheduled.request, proposals.path(place)) for place in _places(scheduled)]
    if not token_numbers:
        return [None] * len(step)
    return _split_by_request(step, decoder.logits(last[token_numbers]), rows)


def _split_by_request(step: Sequence[ScheduledRequest], logits: Tensor, rows: Sequence[Row]) -> list[Drawn | None]:
    """Draw for all rows, (R, vocabulary), at once; return each request's share."""
    row_counts = [scheduled.proposals + 1 if scheduled.draws else 0 for scheduled in step]
    ends = np.cumsum([0, *row_counts]).tolist()
    weights = compute_weights(logits, rows)
    tokens = judge(_chains(step, ends), weights, rows, draw(weights, rows))
    return [
        Drawn(logits[first:end], dict(zip(_places(scheduled), tokens[first:end], strict=True))) if end > first else None
        for scheduled, (first, end) in zip(step, pairwise(ends), strict=True)
    ]


def _chains(step: Sequence[ScheduledRequest], first_rows: Sequence[int]) -> list[Chain]:
    """List the chains that were drawn from a drafter's distribution. first_rows: the first row of each request."""
    return [
        Chain(row, tree.tokens[: scheduled.proposals], cast(list[Tensor], tree.drawn_from[: scheduled.proposals]))
        for scheduled, row in zip(step, first_rows, strict=False)
        if scheduled.draws and scheduled.proposals and (tree := scheduled.request.proposals).drawn_from
    ]


def _places(scheduled: ScheduledRequest) -> list[int]:
    """List the places after which a token is drawn, in the order of the rows."""
    return [ROOT, *scheduled.request.chosen]
