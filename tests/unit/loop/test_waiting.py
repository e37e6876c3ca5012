"""Waiting requests of a tight class go first, and no request starves."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from outrider_runtime.control.settings import SLOClass
from outrider_runtime.loop.waiting import (
    PATIENCE_SHARE,
    PATIENCE_TOKENS,
    decoding_first,
    patience_s,
    patience_used,
    place_last,
)


class Waiting(NamedTuple):
    arrived_at: float
    patience_s: float
    preempted: bool = False


def due(request: Waiting) -> float:
    return -math.inf if request.preempted else request.arrived_at + request.patience_s


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 3.0]), st.sampled_from([1.0, 8.0])), max_size=30))
def test_queue_is_ordered_by_deadline_then_arrival(arrivals):
    """A loose request that came long before is due before a tight one that comes now, so it does not starve."""
    queue: deque[Waiting] = deque()
    now_s = 0.0
    for gap, patience in arrivals:
        now_s += gap
        queue.append(Waiting(now_s, patience))
        place_last(queue, due)
    assert len(queue) == len(arrivals)
    deadlines = [due(request) for request in queue]
    assert deadlines == sorted(deadlines)
    for patience in (1.0, 8.0):
        of_class = [request.arrived_at for request in queue if request.patience_s == patience]
        assert of_class == sorted(of_class)


def test_preempted_request_stays_in_front():
    """Its user already reads; vLLM puts it in front."""
    queue = deque([Waiting(5.0, 60.0, preempted=True), Waiting(0.0, 60.0), Waiting(5.0, 0.1)])
    place_last(queue, due)
    assert list(queue) == [Waiting(5.0, 60.0, preempted=True), Waiting(5.0, 0.1), Waiting(0.0, 60.0)]


def test_a_class_without_ttft_is_as_patient_as_its_tpot_allows():
    """Half a second for a class of 5 ms a token, half a minute for one of 300 ms; a TTFT says more."""
    assert patience_s(SLOClass("tight", 0.005)) == PATIENCE_TOKENS * 0.005
    assert patience_s(SLOClass("tight", 0.005, ttft_s=2.0)) == PATIENCE_SHARE * 2.0


def test_the_prompt_that_used_most_of_its_patience_counts():
    """A tight one of a second's patience that waits for half of it, not a loose one that waits longer."""
    assert patience_used(10.0, [(9.5, 10.5), (8.0, 38.0)]) == 0.5
    assert patience_used(10.0, []) == 0.0


def test_a_lowered_budget_cuts_prompts_alone():
    """Decoding requests run before a prompt that was let in earlier; otherwise the order stays."""
    assert decoding_first([1, 2, 3, 4], lambda number: number % 2 == 0) == [2, 4, 1, 3]
