"""Which requests met their class: from the request's own times, never an average over chunks."""

from __future__ import annotations

import math
import sys
import threading
import time

import numpy as np
import pytest
from outrider_crds.runtime_state import SLOClassState
from outrider_crds.spec import SLOClassSpec
from outrider_runtime.loop.adapter_counts import AdapterCounter
from outrider_runtime.loop.arm_counts import ArmCounter
from outrider_runtime.loop.request_table import RequestTable
from outrider_runtime.loop.slo_accounting import EndedRequest, SLOCounter

CHAT = SLOClassSpec(name="chat", tpot="50ms", ttft="1s")
BATCH = SLOClassSpec(name="batch", tpot="500ms")


@pytest.fixture
def counter() -> SLOCounter:
    counter = SLOCounter()
    counter.configure([CHAT, BATCH], "batch")
    return counter


def finish(counter: SLOCounter, name: str, *, ttft_s: float, tpot_s: float, tokens: int = 11) -> tuple[int, int]:
    """(finished, attained) of the class after one more request."""
    counter.ended(EndedRequest(name, ttft_s, tpot_s * (tokens - 1), tokens))
    state = next(state for state in counter.states() if state.name == name)
    return state.finished, state.attained


def test_a_request_attains_its_class_only_with_both_times(counter: SLOCounter) -> None:
    assert finish(counter, "chat", ttft_s=0.9, tpot_s=0.049) == (1, 1)
    assert finish(counter, "chat", ttft_s=1.1, tpot_s=0.049) == (2, 1)
    assert finish(counter, "chat", ttft_s=0.9, tpot_s=0.051) == (3, 1)


def test_a_class_without_ttft_looks_at_tpot_alone(counter: SLOCounter) -> None:
    assert finish(counter, "batch", ttft_s=1000, tpot_s=0.4) == (1, 1)


def test_a_single_token_has_no_tpot(counter: SLOCounter) -> None:
    """Bug: dividing by tokens - 1."""
    assert finish(counter, "chat", ttft_s=0.5, tpot_s=0, tokens=1) == (1, 1)
    state = counter.states()[0]
    assert sum(state.tpot.counts) == 0
    assert sum(state.ttft.counts) == 1


def give_up(counter: SLOCounter, name: str, *, ttft_s: float, decode_s: float = 0.0, tokens: int = 0) -> SLOClassState:
    """The class after one more client left."""
    counter.ended(EndedRequest(name, ttft_s, decode_s, tokens, aborted=True))
    return next(state for state in counter.states() if state.name == name)


def test_clients_that_give_up_waiting_are_misses(counter: SLOCounter) -> None:
    """One patient client among 1600 that gave up past their TTFT is no attained SLO."""
    for _ in range(1600):
        give_up(counter, "chat", ttft_s=1.5)
    assert finish(counter, "chat", ttft_s=0.5, tpot_s=0.01) == (1601, 1)
    state = counter.states()[0]
    assert state.aborted == 1600
    assert sum(state.ttft.counts) == 1601, "the wait of those who left is in the percentiles"


def test_a_client_that_leaves_before_its_deadline_is_neither(counter: SLOCounter) -> None:
    """The client disconnects before the first token, between two tokens, or in a class without a TTFT."""
    assert give_up(counter, "chat", ttft_s=0.9).finished == 0
    assert give_up(counter, "chat", ttft_s=0.9, decode_s=0.049 * 10 + 0.05, tokens=11).finished == 0
    assert give_up(counter, "batch", ttft_s=1000).finished == 0
    assert [state.aborted for state in counter.states()] == [2, 1]


def test_a_client_that_leaves_a_stalled_answer_is_a_miss(counter: SLOCounter) -> None:
    """The token that does not come counts as late as it is, the second one as well."""
    assert give_up(counter, "chat", ttft_s=0.9, decode_s=3.0, tokens=1).finished == 1
    assert give_up(counter, "chat", ttft_s=0.9, decode_s=3.0, tokens=11).finished == 2
    assert counter.states()[0].attained == 0


def test_a_request_that_the_engine_aborts_is_counted(counter: SLOCounter) -> None:
    """It had waited ten seconds for a first token that was due after one."""
    requests = RequestTable(counter, ArmCounter(np.random.default_rng(0)), AdapterCounter(), slots=1)
    requests.arrived("r", time.time() - 10, {"slo_class": "chat"}, prompt=5, limit=10)
    requests.aborted("r", time.monotonic(), has_stop_strings=False)
    chat = counter.states()[0]
    assert (chat.finished, chat.attained, chat.aborted) == (1, 0, 1)


def test_report_during_a_count_has_whole_requests(counter: SLOCounter) -> None:
    """Bug: the reporter's thread read a request as finished and not yet attained."""

    def count() -> None:
        for _ in range(500):
            finish(counter, "chat", ttft_s=0.1, tpot_s=0.01)

    before, counting = sys.getswitchinterval(), threading.Thread(target=count)
    sys.setswitchinterval(1e-6)
    try:
        counting.start()
        while counting.is_alive():
            chat = counter.states()[0]
            assert chat.finished == chat.attained == sum(chat.ttft.counts) == sum(chat.tpot.counts)
    finally:
        sys.setswitchinterval(before)
        counting.join()


def test_a_request_names_its_class_or_gets_the_default(counter: SLOCounter) -> None:
    assert counter.class_of({"slo_class": "chat"}) == "chat"
    assert counter.class_of(None) == "batch"
    assert counter.class_of({"slo_class": "gone"}) == "batch"


@pytest.mark.parametrize(
    "arguments",
    [
        {"slo_class": ["chat"]},
        {"slo_tpot_ms": 10**400},
        {"slo_tpot_ms": math.nan},
        {"slo_ttft_ms": -1},
        {"slo_ttft_ms": [1]},
        {"slo_tpot_ms": "1"},
    ],
)
def test_slo_argument_of_any_type_is_no_error(counter: SLOCounter, arguments: dict[str, object]) -> None:
    """Bug: vLLM takes lists and any number. Three such requests in a minute suspended all drafters."""
    assert counter.class_of(arguments) == "batch"


def test_counters_survive_a_changed_config(counter: SLOCounter) -> None:
    """Promise: counters only grow; a class that is removed and comes back goes on."""
    finish(counter, "chat", ttft_s=0.1, tpot_s=0.01)
    counter.configure([BATCH], "batch")
    assert [state.name for state in counter.states()] == ["batch"]
    counter.configure([CHAT, BATCH], "chat")
    assert finish(counter, "chat", ttft_s=0.1, tpot_s=0.01) == (2, 2)


def test_changed_slo_holds_for_requests_that_finish_later(counter: SLOCounter) -> None:
    assert finish(counter, "chat", ttft_s=0.1, tpot_s=0.06) == (1, 0)
    counter.configure([SLOClassSpec(name="chat", tpot="70ms")], "chat")
    assert finish(counter, "chat", ttft_s=0.1, tpot_s=0.06) == (2, 1)


def test_without_classes_nothing_is_counted() -> None:
    counter = SLOCounter()
    counter.configure([], None)
    counter.ended(EndedRequest(counter.class_of(None), 0.1, 0.1, 2))
    assert counter.states() == []


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"slo_tpot_ms": 600.0}, "batch"),
        ({"slo_tpot_ms": 499.0}, "chat"),
        ({"slo_tpot_ms": 10.0}, "chat"),
        ({"slo_ttft_ms": 2000.0}, "chat"),
        ({"slo_tpot_ms": 600.0, "slo_ttft_ms": 2000.0}, "chat"),
        ({"slo_class": "batch", "slo_tpot_ms": 10.0}, "batch"),
        ({"slo_tpot_ms": "soon"}, "batch"),
    ],
)
def test_own_slo_is_kept_by_the_loosest_class_that_can(
    counter: SLOCounter, arguments: dict[str, object], name: str
) -> None:
    """A class without a ttft keeps none; where no class keeps the times, the tightest does what it can."""
    assert counter.class_of(arguments) == name


def test_own_slo_of_a_service_without_classes_is_no_class() -> None:
    assert SLOCounter().class_of({"slo_tpot_ms": 10.0}) is None
