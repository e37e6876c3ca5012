"""The target's pass over a step: what it runs over, and the token that it draws behind each place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from outrider_runtime.control.data.forest import ROOT
from outrider_runtime.torch_engine.batch_scheduler import ScheduledRequest
from outrider_runtime.torch_engine.decoder import Decoder
from outrider_runtime.torch_engine.model_runner import Segment
from outrider_runtime.torch_engine.rejection import Chain, judge
from outrider_runtime.torch_engine.token_sampling import Row, draw, row_of, weights_of
from outrider_runtime.torch_engine.tree import ancestors


class Drawn(NamedTuple):
    """Of one request: its rows of logits, and what was drawn from them."""

    logits: Tensor
    """(1 + chosen proposals, vocabulary)"""
    tokens: dict[int, int]
    """ROOT, then the chosen nodes -> the token behind each; in the order of the rows."""


def segment_of(one: ScheduledRequest) -> Segment:
    """Known tokens, or the last one of them and the chosen nodes behind it."""
    request = one.request
    tokens = request.tokens[request.computed : request.computed + one.known]
    if not one.proposals:
        return Segment(request.name, tokens, request.computed)
    tree = request.proposals.only(request.chosen)
    parents = [ROOT, *(parent + 1 for parent in tree.parents)]  # ROOT of the tree is the last known token
    return Segment(request.name, tokens + tree.tokens, request.computed, ancestors(parents))


def draw_behind(step: Sequence[ScheduledRequest], last: Tensor, decoder: Decoder) -> list[Drawn | None]:
    """Of each request; None where its prompt is not read to its end. last: (T, H), of all tokens of the step."""
    wanted, rows, end = list[int](), list[Row](), 0
    for one in step:
        end += one.tokens
        if one.draws:
            wanted += range(end - 1 - one.proposals, end)
            rows += [row_of(one.request, one.request.proposals.path(place)) for place in _places(one)]
    if not wanted:
        return [None] * len(step)
    return _parted(step, decoder.logits(last[wanted]), rows)


def _parted(step: Sequence[ScheduledRequest], logits: Tensor, rows: Sequence[Row]) -> list[Drawn | None]:
    ends = np.cumsum([0, *(one.proposals + 1 if one.draws else 0 for one in step)]).tolist()
    weights = weights_of(logits, rows)
    tokens = judge(_chains(step, ends), weights, rows, draw(weights, rows))
    return [
        Drawn(logits[first:end], dict(zip(_places(one), tokens[first:end], strict=True))) if end > first else None
        for one, (first, end) in zip(step, pairwise(ends), strict=True)
    ]


def _chains(step: Sequence[ScheduledRequest], rows: Sequence[int]) -> list[Chain]:
    """Those that were drawn from a drafter's distribution. rows: each request's first."""
    return [
        Chain(row, tree.tokens[: one.proposals], cast(list[Tensor], tree.drawn_from[: one.proposals]))
        for one, row in zip(step, rows, strict=False)
        if one.draws and one.proposals and (tree := one.request.proposals).drawn_from
    ]


def _places(one: ScheduledRequest) -> list[int]:
    """Behind which something is drawn."""
    return [ROOT, *one.request.chosen]
