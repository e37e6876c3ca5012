"""Acceptance is learned from real trials only, without bias, and follows the traffic."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_runtime.control.acceptance import AGE_HALF_LIFE_S, PRIOR_HAZARD, Acceptance
from outrider_runtime.control.batch import Miss, RequestOutcome


def outcome(accepted: int, verified: int, *, request: str = "r", asked: int | None = None, drafter: str = "d",
            proposed: int | None = None, slo_class: str | None = None) -> RequestOutcome:  # fmt: skip
    asked = verified if asked is None else asked
    return RequestOutcome(
        request, slo_class, drafter, asked, verified if proposed is None else proposed, verified, accepted
    )


def draw(rng: np.random.Generator, hazards: list[float], verified: int) -> int:
    accepted = 0
    while accepted < verified and rng.random() < hazards[accepted]:
        accepted += 1
    return accepted


@pytest.mark.parametrize("hazards", [[0.5, 0.5, 0.5, 0.5], [0.8, 0.6, 0.4, 0.2], [0.3, 0.6, 0.7, 0.7]])
def test_estimates_are_unbiased_where_lengths_vary(hazards):
    """A single alpha would be biased here: acceptance changes with the position and k changes from step to step."""
    rng = np.random.default_rng(3)
    estimates = []
    acceptance = Acceptance(["d"], 4)
    for step in range(700):
        verified = [int(rng.integers(1, 5)) for _ in range(8)]
        outcomes = [
            outcome(draw(rng, hazards, length), length, request=f"{step // 40}-{number}")
            for number, length in enumerate(verified)
        ]
        acceptance.observe(outcomes, now=step * 0.02)
        if step >= 60:
            estimates.append(acceptance.hazards[0].copy())
    assert np.mean(estimates, axis=0) == pytest.approx(hazards, abs=0.035)


def test_positions_after_the_first_rejection_are_no_trials():
    """They were scored against a text that never came to be."""
    acceptance = Acceptance(["d"], 4)
    acceptance.observe([outcome(1, 4)], now=0.0)
    assert acceptance.tried[0].tolist() == [1, 1, 0, 0]
    assert acceptance.accepted[0].tolist() == [1, 0, 0, 0]


def test_a_request_that_was_not_asked_counts_for_nothing():
    """Steps at k = 0, and requests of which nobody proposed anything."""
    acceptance = Acceptance(["d"], 2)
    acceptance.observe(
        [RequestOutcome("r", None, None, 0, 0, 0, 0), outcome(0, 0, drafter="unknown", asked=2)], now=0.0
    )
    assert acceptance.tried.sum() == 0


def test_evidence_ages_by_time_so_that_no_verdict_is_for_ever():
    """By observation alone k = 0 would be absorbing: nothing tried, nothing forgotten."""
    acceptance = Acceptance(["d"], 2)
    for step in range(50):
        acceptance.observe([outcome(0, 2, request=str(step))], now=step * 0.01)
    assert acceptance.hazards[0, 0] < 0.1
    acceptance.age(12 * AGE_HALF_LIFE_S)
    assert acceptance.hazards[0, 0] == pytest.approx(PRIOR_HAZARD, abs=0.02)


def test_a_shift_in_the_traffic_shows_within_fifty_steps_of_one_request():
    """Design, truth: within 50 steps of a shift while speculating, at one request and so one chain a step."""
    rng = np.random.default_rng(5)
    acceptance = Acceptance(["d"], 3)
    for step in range(400):
        acceptance.observe([outcome(draw(rng, [0.8] * 3, 3), 3, request=str(step // 30))], now=step * 0.02)
    for step in range(400, 450):
        acceptance.observe([outcome(draw(rng, [0.15] * 3, 3), 3, request=str(step // 30))], now=step * 0.02)
    assert acceptance.hazards[0, 0] < 0.35


def test_a_request_that_the_draft_knows_well_is_told_from_one_that_it_does_not():
    """One factor per request, shrunk to its class: a batch of both gets unequal lengths."""
    rng = np.random.default_rng(7)
    acceptance = Acceptance(["d"], 2)
    for step in range(60):
        outcomes = [
            outcome(draw(rng, [0.9, 0.9], 2), 2, request="easy"),
            outcome(draw(rng, [0.2, 0.2], 2), 2, request="hard"),
        ]
        acceptance.observe(outcomes, now=step * 0.02)
    paths, _ = acceptance.paths(("easy", "hard", "new"), (None, None, None))
    easy, hard, new = paths[0, 0]
    assert easy > 0.7
    assert hard < 0.4
    assert hard < new < easy


def test_classes_have_factors_of_their_own():
    """Code and chat of one service differ; a new request starts at its class's rate."""
    rng = np.random.default_rng(9)
    acceptance = Acceptance(["d"], 2)
    for step in range(120):
        outcomes = [
            outcome(draw(rng, [0.9] * 2, 2), 2, request=f"code-{step // 10}", slo_class="code"),
            outcome(draw(rng, [0.3] * 2, 2), 2, request=f"chat-{step // 10}", slo_class="chat"),
        ]
        acceptance.observe(outcomes, now=step * 0.02)
    paths, _ = acceptance.paths(("new code", "new chat"), ("code", "chat"))
    assert paths[0, 0, 0] > paths[0, 0, 1] + 0.2


def test_prompt_lookup_is_expected_to_find_what_it_found_before():
    """The hit rate multiplies acceptance; a prompt without repetitions is known by its own misses."""
    acceptance = Acceptance(["d"], 2)
    for step in range(40):
        outcomes = [
            outcome(2, 2, request="repeats", asked=2),
            outcome(0, 0, request="never", asked=2, proposed=0),
        ]
        acceptance.observe(outcomes, now=step * 0.02)
    _, offers = acceptance.paths(("repeats", "never"), (None, None))
    assert offers[0, 0, 0] > 0.75
    assert offers[0, 0, 1] < 0.2
    assert acceptance.hit_rates[0, 0] == pytest.approx(0.5, abs=0.1)


def test_a_lookup_that_the_neural_draft_stood_in_for_found_nothing():
    """Both are learned from one request's step: who proposed is accepted or not, who was asked first has missed."""
    acceptance = Acceptance(["lookup", "draft"], 3)
    stood_in = outcome(1, 2, drafter="draft")._replace(missed=Miss("lookup", 3))
    for step in range(30):
        acceptance.observe([stood_in], now=step * 0.02)
    assert (acceptance.hit_rates[0] < 0.1).all()
    assert acceptance.tried[0].sum() == 0
    assert acceptance.hit_rates[1, 0] == 1.0
    assert acceptance.hazards[1, 0] > 0.8 > 0.4 > acceptance.hazards[1, 1]


def test_thousands_of_finished_requests_leave_nothing_behind():
    """A pod serves for weeks; the tables hold what runs."""
    acceptance = Acceptance(["d"], 2)
    for number in range(3000):
        acceptance.observe([outcome(1, 2, request=f"r{number}")], now=number * 0.01)
        acceptance.forget(f"r{number}")
    assert len(acceptance._requests._slots) == 0
    assert len(acceptance._requests._counts) == 64


def test_probabilities_stay_probabilities_whatever_is_observed():
    """Long runs of acceptance and of rejection."""
    acceptance = Acceptance(["d"], 3)
    for step in range(300):
        acceptance.observe([outcome(3 if step % 100 < 50 else 0, 3)], now=step * 0.01)
        paths, offers = acceptance.paths(("r", "other"), (None, None))
        assert ((paths >= 0) & (paths < 1)).all()
        assert ((offers >= 0) & (offers <= 1)).all()
        assert (np.diff(paths[0], axis=0) <= 0).all()
