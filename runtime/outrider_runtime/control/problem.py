"""From a batch of requests to the arrays that a decision works on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import OF_THIS_STEP, Batch, RequestView
from outrider_runtime.control.choice import TargetPrice
from outrider_runtime.control.costs import Shape
from outrider_runtime.control.drafting import NOBODY, DraftProblem
from outrider_runtime.control.goodput import Goodput
from outrider_runtime.control.latency import OnlineLatency
from outrider_runtime.control.settings import DrafterSpec

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]


class Columns(NamedTuple):
    """Requests turned about: one tuple per field of RequestView, in its order. Built at once by zip, as a batch of 64
    has to be ready in a few microseconds."""

    id: tuple[str | None, ...] = ()
    slo_class: tuple[str | None, ...] = ()
    context_tokens: tuple[int, ...] = ()
    prefill_tokens: tuple[int, ...] = ()
    prefill_left: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    remaining_tokens: tuple[int, ...] = ()
    elapsed_s: tuple[float, ...] = ()
    proposed: tuple[int, ...] = ()
    drafter: tuple[str | None, ...] = ()
    draft_ready: tuple[bool, ...] = ()
    draft_hole: tuple[int, ...] = ()

    @classmethod
    def of(cls, requests: Iterable[RequestView]) -> Columns:
        return cls(*zip(*requests, strict=True))

    def stands(self) -> Iterable[tuple[str | None, float, int]]:
        """Class, seconds elapsed and tokens given, of each."""
        return zip(self.slo_class, self.elapsed_s, self.output_tokens, strict=True)


@dataclass(frozen=True, slots=True)
class Step:
    """The step that is priced: its decoding requests, and the target's cost around them."""

    now: Columns
    """All requests of the batch."""
    decoding: Columns
    """Those that decode in the step that is priced."""
    positions: Iterable[int]
    """Of the decoding requests in `Batch.requests`."""
    price: TargetPrice
    query_costs_s: Floats
    """(N,)"""
    rate: float
    """lambda, tokens per second."""
    budget: int
    """Most proposals that fit into the step and into KV memory."""

    @property
    def requests(self) -> int:
        return len(self.decoding.id)


def this_step(batch: Batch, latency: OnlineLatency, goodput: Goodput) -> Step:
    """The step about to be scheduled, before any proposal is verified."""
    every = Columns.of(batch.requests)
    filling: Iterable[int] = every.prefill_tokens
    if any(every.prefill_left):
        filling = [now + later for now, later in zip(every.prefill_tokens, every.prefill_left, strict=True)]
    return _step(batch, every, filling, sum(every.prefill_tokens), 0, latency, goodput)


def next_step(batch: Batch, latency: OnlineLatency, goodput: Goodput) -> Step:
    """The step after the one that `batch` runs: who still prefills then, prefills; who decodes gains a token now."""
    every = Columns.of(batch.requests)
    return _step(batch, every, every.prefill_left, sum(every.prefill_left), 1, latency, goodput)


def _step(
    batch: Batch, every: Columns, filling: Iterable[int], prefill: int, produced: int,
    latency: OnlineLatency, goodput: Goodput,
) -> Step:  # fmt: skip
    """`filling`: prompt tokens that keep each request from decoding; `prefill`: those in the step."""
    decoding, positions = _decoding(batch, every, filling, produced)
    requests = len(decoding.id)
    prefill = min(prefill, max(0, batch.token_budget - requests))
    context = sum(decoding.context_tokens)
    base = Shape(
        n_context=float(sum(every.context_tokens)),
        n_batched=float(requests + prefill),
        n_requests=float(len(every.id)),
        n_context_query=context / 1000,
        n_prompt=float(prefill),
    )
    price = latency.price(base, uniform=prefill == 0)
    per_query = price.ragged.per_context_query_s / 1000
    return Step(
        now=every,
        decoding=decoding,
        positions=positions,
        price=price,
        query_costs_s=np.array(decoding.context_tokens) * per_query if per_query > 0 else np.zeros(requests),
        # Beside a prompt a second is worth no less than before it and after it.
        rate=goodput.rate(latency.plain_rate(Shape(context, requests, requests, context / 1000))),
        budget=min(batch.token_budget, batch.free_kv_tokens) - len(every.id) - prefill,  # a token each, at least
    )


def _decoding(batch: Batch, every: Columns, filling: Iterable[int], produced: int) -> tuple[Columns, Iterable[int]]:
    """The requests that decode, and where they stand in the batch."""
    left = every.remaining_tokens
    if not any(filling) and min(left, default=0) > produced:  # nearly always
        return every, range(len(left))
    kept = [i for i, (fill, rest) in enumerate(zip(filling, left, strict=True)) if fill == 0 and rest > produced]
    return Columns.of([batch.requests[i] for i in kept]), kept


def verification_gains(step: Step, acceptance: Acceptance, limit: int) -> Floats:
    """(K, N): products of hazards of the real proposals that wait, 0 where there is none or no room for it."""
    columns = step.decoding
    drafters = acceptance.numbers(columns.drafter)
    gains = acceptance.paths_of(drafters, columns.id, columns.slo_class)
    proposed = np.array(columns.proposed, dtype=int)
    if min(columns.remaining_tokens, default=0) > limit:  # nearly always
        room = np.where(drafters == NOBODY, 0, proposed)
    else:
        left = np.array(columns.remaining_tokens, dtype=int)
        room = np.where(drafters == NOBODY, 0, np.minimum(proposed, left - 1))
    if len(room) and room.min() < len(gains):
        gains *= np.arange(len(gains))[:, None] < room
    return gains


def draft_problem(
    step: Step, acceptance: Acceptance, latency: OnlineLatency,
    drafters: tuple[DrafterSpec, ...], usable: NDArray[np.bool_], limit: int,
    *, assume_ready: bool = False, prompt_tokens: int = 0,
) -> DraftProblem:  # fmt: skip
    """`usable`: (D,), drafters that may run at all. `assume_ready`: as if the draft's KV were whole everywhere.
    `prompt_tokens`: those of the step under way that the neural draft reads only because it proposes."""
    columns = step.decoding
    gains, offers = acceptance.paths(columns.id, columns.slo_class)
    gains, offers = gains[:, :limit], offers[:, :limit]
    room = min(columns.remaining_tokens, default=0) - OF_THIS_STEP
    if room < limit:
        left = np.array(columns.remaining_tokens, dtype=int)
        gains = gains * (np.arange(limit)[:, None] < left - OF_THIS_STEP)
    neural = next((number for number, drafter in enumerate(drafters) if drafter.neural), NOBODY)
    able = np.repeat(usable[:, None], step.requests, axis=1)  # (D, N)
    if neural != NOBODY and not assume_ready:
        able[neural] &= np.array(columns.draft_ready, dtype=bool)
    draft_s = draft_seconds(columns, latency, drafters, limit)
    neural_token_s = latency.draft_token_s(drafters[neural].name, step.requests) if neural != NOBODY else 0.0
    if prompt_tokens and neural != NOBODY:
        draft_s[neural, 1:] += prompt_tokens * latency.draft_token_s(drafters[neural].name, prompt_tokens)
    return DraftProblem(
        gains=gains,
        offers=offers,
        usable=able,
        neural=neural,
        draft_s=draft_s,
        query_costs_s=step.query_costs_s,
        neural_token_s=neural_token_s,
        price=step.price,
        rate=step.rate,
        budget=step.budget,
    )


def draft_seconds(decoding: Columns, latency: OnlineLatency, drafters: tuple[DrafterSpec, ...], limit: int) -> Floats:
    """(D, K+1): each drafter's seconds for each draft length. Passes after the first cost alike.

    A token a request, in the first pass too: what that pass costs for the tokens being verified belongs to the choice
    of verifying them (`neural_token_s`), and what it costs for prompts is spent anyway where the draft's KV is kept
    whole (elsewhere `draft_problem` adds it).
    """
    requests, context = float(len(decoding.id)), float(sum(decoding.context_tokens))
    shape = Shape(context, requests, requests, context / 1000)
    pairs = [(latency.draft_s(each.name, shape, 1), latency.draft_s(each.name, shape, 2)) for each in drafters]
    rows = [[0.0, *[once + (twice - once) * more for more in range(limit)]] for once, twice in pairs]
    return np.array(rows).reshape(len(drafters), limit + 1)
