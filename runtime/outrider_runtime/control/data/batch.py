"""The running requests of one decision, as columns. Shapes: N requests, D drafters of the pool, in its order."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOBODY = -1
"""In place of a drafter's number: nothing is proposed for the request. In place of a class: it has none."""


STABLE, CANDIDATE = range(2)
"""Arms of a draft canary: the pool of the running revision, and that of the spec."""


class Waiting(NamedTuple):
    """The request that is let in next."""

    slo_class: int
    """Position in `HotSettings.slo_classes`, or NOBODY."""
    prompt_tokens: int
    """Not cached."""
    left: int
    """Tokens that it may produce."""
    overdue: bool = False
    """It has waited as long as its class bears."""


class Columns(NamedTuple):
    """The columns of a `Batch`, as compiled code takes them."""

    slot: Ints
    slo_class: Ints
    context: Ints
    prompt: Ints
    prompt_left: Ints
    left: Ints
    emitted: Ints
    elapsed_s: Floats
    missing: Ints


_columns = attrgetter(*Columns._fields)


@dataclass(slots=True, eq=False)
class Batch:
    """One row for each running request, in the engine's order. Integer columns are int64, times float64. Nobody changes
    it: it is not frozen as that takes as long to make as a part of the decision does."""

    slot: Ints
    """(N,): the engine's slot of the request. What is known about a request is kept by slot until
    `Controller.release(slots)`."""
    slo_class: Ints
    """(N,): position in `HotSettings.slo_classes`, or NOBODY."""
    context: Ints
    """(N,): tokens whose KV is cached before this step."""
    prompt: Ints
    """(N,): prompt tokens that this step computes; 0 when the request decodes."""
    prompt_left: Ints
    """(N,): prompt tokens that remain after this step; 0 means that it decodes in the next step."""
    left: Ints
    """(N,): tokens that it may still produce (max_tokens and the model's length limit)."""
    emitted: Ints
    """(N,): tokens already given to the user."""
    elapsed_s: Floats
    """(N,): seconds since its first token; 0 before that."""
    missing: Ints
    """(D, N): tokens, those of this step included, that are not in the drafter's cache and that it can still be fed.
    A draft model can be fed all of them, a head those of this step. 0 for a drafter without a cache. plan_verify
    does not look at it."""
    now: float
    """Monotonic seconds."""
    token_budget: int
    """Batched tokens that one step may hold (max_num_batched_tokens)."""
    free_kv_tokens: int
    """Tokens that still fit into the KV cache, those that fit into memory which these requests hold among them."""
    next: Waiting | None = None
    """Who waits to be let in; None for nobody."""
    waiting: int = 0
    """Requests that wait and will have a place once it is free for them, `next` among them."""
    patience_used: float = 0.0
    """Largest share of the time which its class bears that a prompt has waited or been read for."""
    arm: Ints | None = None
    """(N,): STABLE, CANDIDATE, or -1 for a request from before the canary, which is decided with the stable arm and not
    counted. None: no canary."""

    def __post_init__(self) -> None:
        self.missing = np.ascontiguousarray(self.missing)

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def columns(self) -> tuple[Any, ...]:
        """As `Columns`, in a plain tuple, which a call unpacks faster."""
        return _columns(self)

    @property
    def decodes(self) -> Bools:
        """(N,): requests without prompt tokens in this step or after it."""
        return np.asarray(self.prompt + self.prompt_left == 0)
