"""From a batch of requests to the arrays that a decision works on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import Batch, RequestView
from outrider_runtime.control.choice import TargetPrice
from outrider_runtime.control.costs import Shape
from outrider_runtime.control.decision import NOBODY, DraftProblem
from outrider_runtime.control.goodput import Goodput
from outrider_runtime.control.latency import OnlineLatency
from outrider_runtime.control.settings import DrafterSpec

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """The step that is priced: its decoding requests, and the target's cost around them."""

    decoding: tuple[RequestView, ...]
    positions: tuple[int, ...]
    """Of the decoding requests in `Batch.requests`."""
    price: TargetPrice
    query_costs_s: Floats
    """(N,)"""
    rate: float
    """lambda, tokens per second."""
    budget: int
    """Most proposals that fit into the step and into KV memory."""


def this_step(batch: Batch, latency: OnlineLatency, goodput: Goodput) -> Step:
    """The step about to be scheduled, before any proposal is verified."""
    prefill = sum(view.prefill_tokens for view in batch.requests)
    decodes = [view.prefill_tokens == view.prefill_left == 0 < view.remaining_tokens for view in batch.requests]
    return _step(batch, decodes, prefill, latency, goodput)


def next_step(batch: Batch, latency: OnlineLatency, goodput: Goodput) -> Step:
    """The step after the one that `batch` runs: who still prefills then, prefills."""
    prefill = sum(view.prefill_left for view in batch.requests)
    decodes = [view.prefill_left == 0 and view.remaining_tokens > 1 for view in batch.requests]
    return _step(batch, decodes, prefill, latency, goodput)


def _step(batch: Batch, decodes: list[bool], prefill: int, latency: OnlineLatency, goodput: Goodput) -> Step:
    positions = tuple(position for position, it_does in enumerate(decodes) if it_does)
    decoding = tuple(batch.requests[i] for i in positions)
    requests = len(decoding)
    prefill_tokens = min(prefill, max(0, batch.token_budget - requests))
    contexts = np.array([view.context_tokens for view in decoding], dtype=float)
    base = Shape(
        n_context=float(sum(view.context_tokens for view in batch.requests)),
        n_batched=float(requests + prefill_tokens),
        n_requests=float(len(batch.requests)),
        n_context_query=float(contexts.sum()) / 1000,
    )
    price = latency.price(base, uniform=prefill_tokens == 0)
    plain_s = float(price.uniform_s(np.zeros(1))[0])
    return Step(
        decoding=decoding,
        positions=positions,
        price=price,
        query_costs_s=contexts * (price.ragged.per_context_query_s / 1000),
        rate=goodput.rate(requests / plain_s) if plain_s > 0 else 0.0,
        budget=min(batch.token_budget, batch.free_kv_tokens) - requests - prefill_tokens,
    )


def verification_gains(step: Step, acceptance: Acceptance, limit: int) -> Floats:
    """(N, K): products of hazards of the real proposals that wait, 0 where there is none or no room for it."""
    ids, classes = [view.id for view in step.decoding], [view.slo_class for view in step.decoding]
    paths = acceptance.paths(ids, classes)  # (D, N, K)
    drafters = np.array([acceptance.index.get(view.drafter or "", NOBODY) for view in step.decoding], dtype=int)
    usable = [min(view.proposed, view.remaining_tokens - 1, limit) for view in step.decoding]
    room = np.where(drafters == NOBODY, 0, usable)
    reached = np.arange(paths.shape[2]) < room[:, None]
    return np.where(reached, paths[drafters, np.arange(len(drafters))], 0.0)


def draft_problem(
    step: Step, batch: Batch, acceptance: Acceptance, latency: OnlineLatency,
    drafters: tuple[DrafterSpec, ...], usable: NDArray[np.bool_], limit: int, *, assume_ready: bool = False,
) -> DraftProblem:  # fmt: skip
    """`usable`: (D,), drafters that may run at all. `assume_ready`: as if the draft's KV were whole everywhere."""
    ids, classes = [view.id for view in step.decoding], [view.slo_class for view in step.decoding]
    room = np.array([view.remaining_tokens - 2 for view in step.decoding], dtype=int)  # one token comes from this step
    reached = np.arange(limit) < room[:, None]  # (N, K)
    ready = np.array([view.draft_ready or assume_ready for view in step.decoding], dtype=bool)
    neural = np.array([drafter.neural for drafter in drafters], dtype=bool)
    return DraftProblem(
        gains=np.where(reached, acceptance.paths(ids, classes)[:, :, :limit], 0.0),
        offers=acceptance.offers(ids)[:, :, :limit],
        usable=usable[:, None] & (ready | ~neural[:, None]),
        neural=int(neural.argmax()) if neural.any() else NOBODY,
        draft_s=draft_seconds(batch, latency, drafters, limit),
        query_costs_s=step.query_costs_s,
        price=step.price,
        rate=step.rate,
        budget=step.budget,
    )


def draft_seconds(batch: Batch, latency: OnlineLatency, drafters: tuple[DrafterSpec, ...], limit: int) -> Floats:
    """(D, K+1): each drafter's seconds at the end of the step that `batch` runs. Passes after the first cost alike."""
    first = draft_shape(batch)
    seconds = np.zeros((len(drafters), limit + 1))
    for number, drafter in enumerate(drafters):
        once, twice = (latency.draft_s(drafter.name, first, tokens) for tokens in (1, 2))
        seconds[number, 1:] = once + (twice - once) * np.arange(limit)
    return seconds


def draft_shape(batch: Batch) -> Shape:
    """Of the draft's first pass: every token of the target's step, prefill and proposals that fail included."""
    n_context = n_batched = 0
    for view in batch.requests:
        n_context += view.context_tokens
        n_batched += view.prefill_tokens or 1 + view.proposed
    return Shape(float(n_context), float(n_batched), float(len(batch.requests)), n_context / 1000)
