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

NO_DRAFTER = -1
"""Stands for a drafter's number: no drafter proposes for the request."""
NO_CLASS = -1
"""Stands for an SLO class's number: the request has none."""
NO_ARM = -1
"""Stands for an arm's number: the request is from before the canary."""


STABLE, CANDIDATE = range(2)
"""Arms of a draft canary: the pool of the running revision, and that of the spec."""


class Waiting(NamedTuple):
    """The request that starts next."""

    slo_class: int
    """Position in `HotSettings.slo_classes`, or NO_CLASS."""
    prompt_tokens: int
    """Prompt tokens that are not in the KV cache."""
    left: int
    """Tokens that it may produce."""
    overdue: bool = False
    """It has waited as long as its class tolerates."""


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
    """One row for each running request, in the engine's order. Integer columns are int64, times float64.

    Treat it as immutable. It is not frozen, since making a frozen object costs a noticeable part of a decision's time.
    """

    slot: Ints
    """(N,): the engine's slot of the request. The controller keeps what it learns about a request under its slot, until
    `Controller.release(slots)`."""
    slo_class: Ints
    """(N,): position in `HotSettings.slo_classes`, or NO_CLASS."""
    context: Ints
    """(N,): tokens whose KV is cached before this step."""
    prompt: Ints
    """(N,): prompt tokens that this step computes; 0 when the request decodes."""
    prompt_left: Ints
    """(N,): prompt tokens that remain after this step; 0 means that it decodes in the next step."""
    left: Ints
    """(N,): tokens that it may still produce (max_tokens and the model's length limit)."""
    emitted: Ints
    """(N,): tokens already sent to the user."""
    elapsed_s: Floats
    """(N,): seconds since its first token; 0 before that."""
    missing: Ints
    """(D, N): the KV gap: tokens, including this step's, that the drafter's cache lacks and that it can still be fed.
    A draft model can be fed all of them; a head only those of this step. 0 for a drafter without a cache. Unused by
    `plan_verify`."""
    now_s: float
    """Monotonic seconds."""
    token_budget: int
    """Batched tokens that one step may hold (max_num_batched_tokens)."""
    free_kv_tokens: int
    """Tokens that still fit into the KV cache, including free space in blocks that these requests already hold."""
    next: Waiting | None = None
    """The waiting request that starts next; None: no request waits."""
    waiting: int = 0
    """Waiting requests that will run once there is room for them, `next` included."""
    patience_used: float = 0.0
    """Time waited or in prefill / the time that the class tolerates; the largest such ratio of any prompt."""
    arm: Ints | None = None
    """(N,): STABLE, CANDIDATE, or NO_ARM for a request from before the canary, which is decided with the stable arm and
    not counted. None: no canary."""

    def __post_init__(self) -> None:
        self.missing = np.ascontiguousarray(self.missing)

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def columns(self) -> tuple[Any, ...]:
        """Fields of `Columns`, in a plain tuple: compiled calls unpack it faster than a named one."""
        return _columns(self)

    @property
    def decodes(self) -> Bools:
        """(N,): requests without prompt tokens in this step or after it."""
        return np.asarray(self.prompt + self.prompt_left == 0)
