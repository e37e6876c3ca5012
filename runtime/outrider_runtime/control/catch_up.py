"""Safe resume after steps without the neural draft: which holes in its KV a draft-only forward should close.

TurboSpec (section 4.2) leaves a request whose draft KV is not whole without speculation for good. Here the draft runs
over the tokens that it missed where that pays: where what speculation is expected to gain over the rest of the answer
exceeds what the forward costs, both in tokens at lambda, the price of a second. N requests, K positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.costs import Shape
from outrider_runtime.control.decision import choose_draft
from outrider_runtime.control.drafting import NOBODY, DraftChoice, DraftProblem
from outrider_runtime.control.problem import Columns
from outrider_runtime.control.slo import expected_rest

LEAST_CHUNK_TOKENS = 32
"""A part of a hole that is shorter would mostly pay for the call, and the hole grows at every step."""

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Room:
    """How much one step bears."""

    tokens: int
    seconds: float
    """Infinite where no SLO class decodes."""


def holes_to_close(
    requests: Columns, problem: DraftProblem, now: DraftChoice, whole: DraftChoice,
    pass_s: Callable[[Shape], float], room: Room,
) -> dict[str, int]:  # fmt: skip
    """Request -> tokens, from the beginning of its hole on, that the draft should run over at the end of this step.

    requests: those that decode in the next step. problem: theirs as if no KV had a hole; whole: its best choice; now:
    the best choice as things are. pass_s: seconds of a forward of the draft alone. What does not fit into `room` is
    left for later steps: a request may be drafted for when its hole is closed.
    """
    holes = np.array(requests.draft_hole, dtype=int)
    newcomers = (whole.drafters == problem.neural) & (whole.drafters != NOBODY) & (holes > 0)
    if not newcomers.any():
        return {}
    starts = np.array(requests.context_tokens, dtype=int) - holes
    costs = np.full(len(holes), np.inf)
    for i in np.flatnonzero(newcomers):
        costs[i] = problem.rate * _whole_hole_s(int(starts[i]), int(holes[i]), pass_s, room)
    returns = _returns(requests, problem, now, whole, newcomers, costs)
    order = [int(i) for i in np.argsort(-returns, kind="stable") if returns[i] > 0]
    return {str(requests.id[i]): tokens for i, tokens in _packed(order, starts, holes, pass_s, room)}


def _returns(
    requests: Columns, problem: DraftProblem, now: DraftChoice, whole: DraftChoice, newcomers: Bools, costs: Floats
) -> Floats:
    """(N,): gain over cost of each hole that pays, else 0.

    The passes of a step are shared by all that they serve: those who stay away make it dearer for the others, so the
    choice is made again without them until it holds.
    """
    while newcomers.any():
        gains = expected_gains(requests, problem, now, whole, int(newcomers.sum()))
        paying = newcomers & (costs < gains)
        if (paying == newcomers).all():
            return np.asarray(np.where(paying, gains / np.maximum(costs, 1e-12), 0.0))
        usable = problem.usable.copy()
        usable[problem.neural] &= np.array(requests.draft_ready, dtype=bool) | paying
        whole = choose_draft(replace(problem, usable=usable))
        newcomers = paying & (whole.drafters == problem.neural)
    return np.zeros(len(costs))


def expected_gains(
    requests: Columns, problem: DraftProblem, now: DraftChoice, whole: DraftChoice, newcomers: int
) -> Floats:
    """(N,): tokens that the neural draft is worth over the rest of each request's answer, at `whole`'s draft length.

    Counted is what it brings beyond the best lookup, less an equal share of what its passes would cost beyond those
    that run now. Few answers use all of max_tokens: see `expected_rest`.
    """
    neural, passes = problem.neural, whole.neural_tokens
    worth, accepted = _worth(problem, neural, passes)
    others = [d for d in range(len(problem.gains)) if d != neural and problem.usable[d].any()]
    looked_up = [np.where(problem.usable[d], _worth(problem, d, problem.gains.shape[1])[0], 0.0) for d in others]
    passes_s = problem.draft_s[neural]
    more_s = max(0.0, float(passes_s[passes] - (passes_s[now.neural_tokens] if now.neural_tokens else 0.0)))
    share = problem.rate * more_s / max(1, newcomers)
    given, left = np.array(requests.output_tokens, dtype=float), np.array(requests.remaining_tokens, dtype=float)
    steps = expected_rest(left, given) / (1.0 + accepted)
    return np.asarray(steps * (worth - np.max([np.zeros(len(worth)), *looked_up], axis=0) - share))


def _worth(problem: DraftProblem, drafter: int, positions: int) -> tuple[Floats, Floats]:
    """Twice (N,): what the positions that pay add in a step, net of the target's price, and the tokens they bring."""
    token_s = problem.price.token_s() + problem.query_costs_s
    if drafter == problem.neural:
        token_s = token_s + problem.neural_token_s
    gains = problem.gains[drafter, :positions]
    net = gains - problem.rate * token_s
    offered = (net > 0) * problem.offers[drafter, :positions]
    return (net * offered).sum(axis=0), (gains * offered).sum(axis=0)


def _whole_hole_s(start: int, hole: int, pass_s: Callable[[Shape], float], room: Room) -> float:
    """Seconds of closing one hole alone; in as many steps as the room asks for. Infinite where nothing fits."""
    chunk = _fitting(_EMPTY, start, hole, pass_s, room)
    if chunk == 0:
        return math.inf
    calls = math.ceil(hole / chunk)
    return pass_s(_with(_EMPTY, start, hole)) + (calls - 1) * pass_s(_with(_EMPTY, start, 0))


def _packed(
    order: list[int], starts: Ints, holes: Ints, pass_s: Callable[[Shape], float], room: Room
) -> list[tuple[int, int]]:
    """(request, tokens) of one forward, the best return first."""
    packed, taken = [], _EMPTY
    for i in order:
        tokens = _fitting(taken, int(starts[i]), int(holes[i]), pass_s, room)
        if tokens:
            packed.append((i, tokens))
            taken = _with(taken, int(starts[i]), tokens)
    return packed


def _fitting(taken: Shape, start: int, hole: int, pass_s: Callable[[Shape], float], room: Room) -> int:
    """Tokens of the hole that fit beside what is taken: all, or a chunk that is worth a call; else 0."""
    tokens, least = min(hole, room.tokens - int(taken.n_batched)), min(hole, LEAST_CHUNK_TOKENS)
    while tokens >= least and pass_s(_with(taken, start, tokens)) > room.seconds:
        tokens //= 2
    return tokens if tokens >= least else 0


_EMPTY = Shape(0.0, 0.0, 0.0)


def _with(taken: Shape, start: int, tokens: int) -> Shape:
    return Shape(
        taken.n_context + start, taken.n_batched + tokens, taken.n_requests + 1,
        taken.n_context_query + start * tokens / 1000,
    )  # fmt: skip
