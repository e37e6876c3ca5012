"""What `GET /outrider/why` says of a decision."""

from __future__ import annotations

import numpy as np
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.control.state import Weighed
from outrider_runtime.loop.why import Decisions, decision_sentence

from tests.engine.engines import eagle, lookup
from tests.unit.control import columns
from tests.unit.loop.pods import control_loop

WEIGHED = Weighed(41e-6, 2100.0, (0.3, 0.12), (9e-4, 2e-5))


def plan(passes: list[int], drafter_order: list[list[int]], purpose: Purpose = Purpose.CHOICE) -> DraftPlan:
    chains = np.ones(len(passes), np.int64)
    return DraftPlan(np.array(passes), chains, np.array(drafter_order), np.zeros((2, 2), np.int64), purpose)


def test_decision_is_described_with_what_it_weighed() -> None:
    said = decision_sentence(["eagle", "pld"], columns.batch(2, 2), plan([0, 0], [[NO_DRAFTER, NO_DRAFTER]]), WEIGHED)
    assert said == (
        "2 requests: k = 0; a verified token costs 41 us, or 0.09 tokens (lambda is 2100 tok/s); a request's first "
        "proposal is expected to bring: eagle 0.30 tokens for 900 us of drafting, pld 0.12 tokens for 20 us of drafting"
    )


def test_unknown_token_cost_is_not_printed_as_zero() -> None:
    """Bug: without a profile every line said that a verified token costs 0 us, or 0.00 tokens."""
    said = decision_sentence(
        ["pld"], columns.batch(2, 2), plan([0], [[NO_DRAFTER]]), Weighed(0.0, 300.0, (0.3,), (2e-5,))
    )
    assert said.startswith(
        "2 requests: k = 0; a verified token costs too little to tell yet (lambda is 300 tok/s); a request's first"
    )


def test_one_request_is_one_request() -> None:
    no_drafters = DraftPlan(
        np.zeros(1, int), np.ones(1, int), np.array([[NO_DRAFTER]]), np.zeros((1, 1), int), Purpose.CHOICE
    )
    assert decision_sentence(["pld"], columns.batch(1, 1), no_drafters, None) == "1 request: k = 0"


def test_decision_names_the_drafters_and_the_reason() -> None:
    two = plan([2, 3], [[1, 1], [0, NO_DRAFTER]], Purpose.SLO)
    said = decision_sentence(["eagle", "pld"], columns.batch(2, 2), two, None)
    assert said == "2 requests: k = 2 from eagle for 1, k = 3 from pld for 2 because requests are behind their TPOT"


def test_each_report_adds_the_last_decision_and_the_oldest_go() -> None:
    loop = control_loop([eagle(), lookup()])
    decisions = Decisions(loop)
    assert decisions.text(0.0) == ""
    for second in range(50):
        loop.plan_draft(columns.batch(2, 2))
        text = decisions.text(float(second))
        assert decisions.text(second + 0.5) == text, "nothing was decided since"
    lines = text.splitlines()
    assert len(lines) == 40
    assert lines[-1].startswith("00:00:49.00 2 requests: ")
    assert "a verified token costs" in lines[-1]


def test_a_decision_names_its_first_requests() -> None:
    """An id that a client sent is found in the decisions about its request."""
    loop = control_loop([lookup()])
    loop.request_names = [f"chatcmpl-{number}" for number in range(6)]
    loop.plan_draft(columns.batch(6, 1))
    line = Decisions(loop).text(0.0).rstrip()
    assert line.endswith("; requests: chatcmpl-0, chatcmpl-1, chatcmpl-2, chatcmpl-3 and 2 more")
