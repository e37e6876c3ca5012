"""The state of the engine's requests, as columns, like in vLLM's scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.simulate.replay.workload import Floats, Ints, Workload

BLOCK_TOKENS = 16  # of a KV block, as in vLLM
Rows = NDArray[np.int64]
"""Numbers of requests, in the order in which the engine runs them."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestStates:
    """State of some requests at one moment. All (N,)."""

    rows: Rows
    context: Ints
    """Tokens whose KV is cached."""
    produced: Ints
    slot: Ints
    prompt: Ints
    slo_class: Ints
    first_s: Floats
    todo: Ints
    """Tokens known or in flight that are not computed yet; 1 for a decoding request: the last sampled token."""
    left: Ints
    """Tokens that it may still produce."""
    decodes: NDArray[np.bool_]


class ReplayRequests:
    """Rows are requests of the workload, arrived or not."""

    def __init__(self, load: Workload) -> None:
        count = len(load)
        self.load = load
        self._columns: Ints = np.zeros((7, count), np.int64)
        self.context, self.produced, self.slot, self.prompt, output, slo_class, self.placeholders = self._columns
        """`placeholders`: output tokens in flight, draft tokens counted as accepted; their number is not known yet."""
        self.prompt[:], output[:], slo_class[:], self.slot[:] = load.prompt, load.output, load.slo_class, -1
        self.arrived_s: Floats = load.at_s.copy()
        self.due_s: Floats = load.at_s.copy()
        """Deadline of admission: arrival plus the patience of its class; minus infinity after a preemption."""
        self.first_s: Floats = np.full(count, np.nan)
        self.done_s: Floats = np.full(count, np.nan)
        self.preemptions = 0

    def select(self, rows: Rows) -> RequestStates:
        context, produced, slot, prompt, output, slo_class, placeholders = self._columns.take(rows, axis=1)
        known = produced + placeholders
        todo = prompt + known - context
        decodes = (known > 0) & (todo == 1)
        return RequestStates(
            rows, context, produced, slot, prompt, slo_class, self.first_s[rows], todo, output - produced, decodes
        )

    def ends_in_flight(self, rows: Rows) -> NDArray[np.bool_]:
        """(N,): requests whose steps in flight reach the last token, even if every draft token in them is rejected."""
        certain = self.context[rows] + 2 - self.placeholders[rows]
        return np.asarray((self.placeholders[rows] > 0) & (certain >= self.prompt[rows] + self.load.output[rows]))

    def schedule(self, states: RequestStates, tokens: Ints) -> None:
        """Count a step's `tokens` (N,) as computed, and its draft tokens as accepted."""
        self.context[states.rows] += tokens
        yields = states.decodes | (tokens == states.todo)
        self.placeholders[states.rows] += np.where(yields, np.where(states.decodes, tokens, 1), 0)

    def preempt(self, rows: Rows) -> None:
        """Drop the KV of preempted requests. Output in flight still arrives."""
        self.context[rows] = self.placeholders[rows] = 0


def blocks(tokens: Ints) -> Ints:
    return np.asarray(-(-tokens // BLOCK_TOKENS))
