"""The replay's device chooses which proposals the target verifies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from outrider_runtime.control.batch import Batch
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.plans import DeviceOrder, Forest, VerifyPlan
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.loop.confidences import UNKNOWN, Calibrator
from outrider_runtime.simulate import recording as recordings
from outrider_runtime.simulate.replay.engine import ReplayEngine, Setting
from outrider_runtime.simulate.replay.fitted_profile import fit_profile
from outrider_runtime.simulate.replay.policies import Fixed
from outrider_runtime.simulate.replay.ranked_proposals import MIN_ACCEPTANCE, acceptance, verification_lengths
from outrider_runtime.simulate.replay.step_scheduler import Limits
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_closed_load
from outrider_runtime.simulate.worlds import world as worlds

POOL = (
    Drafter("eagle", passes=True, needs_hidden=True),
    Drafter("lookup"),
)
WORLD = worlds.load("llama-3.1-8b-h200")
LIFTED = recordings.lift(recordings.load_shipped(), 0.7, seed=0)


def test_ranking_gives_the_budget_to_the_likeliest_proposals():
    """0.9, 0.81 and 0.8 beat 0.4, which beats 0: the request without a proposal gets nothing."""
    survival = np.array([[0.9, 0.81, 0.4], [0.8, 0.32, 0.0], [0.0, 0.0, 0.0]])
    caps, nothing = np.array([3, 3, 3]), np.zeros(3, np.int64)
    assert verification_lengths(survival, caps, nothing, 4).tolist() == [3, 1, 0]
    assert verification_lengths(survival, caps, np.array([0, 2, 2]), 4).tolist() == [2, 2, 0]
    assert verification_lengths(survival, np.array([1, 3, 3]), nothing, 9 - 2).tolist() == [1, 3, 3]


def test_acceptance_of_no_proposal_is_nothing():
    """Log-odds 1.0 and the start values of calibration: 1 / (1 + exp(-(0.5 - 0.2))) = 0.574."""
    quanta = np.array([[8, UNKNOWN], [-127, -127]], np.int8)
    chances = acceptance(np.array([1, 0]), np.array([0, -1]), quanta, Calibrator(2, 2).current)
    assert chances[0] == pytest.approx([0.574, 0.0], abs=1e-3)
    assert not chances[1].any()
    sure_of_no = acceptance(np.array([2]), np.array([0]), quanta[1:], Calibrator(2, 2).current)
    assert (sure_of_no >= MIN_ACCEPTANCE).all()


def served(load: Workload) -> tuple[ReplayEngine, list[VerifyPlan]]:
    limits = Limits()
    settings = Settings(
        POOL, 5, limits.slots, largest_graph_tokens=WORLD.graph_tokens, scores_placeholders=True,
        device_ranks=True,
    )  # fmt: skip
    controller = Controller(
        settings, fit_profile(WORLD, POOL, np.random.default_rng(1)), clock=lambda: 0.0, rng=np.random.default_rng(2)
    )
    plans: list[VerifyPlan] = []
    plan_verify = controller.plan_verify

    def planned(*arguments: Any) -> VerifyPlan:
        plans.append(plan_verify(*arguments))
        return plans[-1]

    controller.plan_verify = planned  # type: ignore[method-assign, assignment]
    engine = ReplayEngine(Setting(WORLD, LIFTED, POOL, limits, device_ranks=True), load, controller)
    engine.run()
    return engine, plans


@pytest.mark.slow
def test_device_verifies_no_more_than_is_ordered():
    """Placeholders beyond the order stay unverified, and every request still gets its tokens."""
    load = draw_closed_load(48, 144, LIFTED, None, np.random.default_rng(0), Lengths(300, 48))
    engine, plans = served(load)
    orders = [plan.device for plan in plans if plan.device is not None]
    assert sum(order.tokens for order in orders) < sum(int(order.caps.sum()) for order in orders if order.tokens)
    assert sum(engine.log.verified) <= sum(order.tokens for order in orders)
    assert (engine.requests.produced == load.output).all()


class Half(Fixed):
    """Verify half of the scheduled placeholders: the first ones of each request, or what a device chooses."""

    def __init__(self, *, by_device: bool) -> None:
        super().__init__(POOL, drafter=1, k=4)
        self._by_device = by_device

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        plan = super().plan_verify(batch, forest)
        half, nothing = plan.lengths // 2, np.zeros(len(batch), np.int64)
        order = DeviceOrder(int(half.sum()), plan.lengths, nothing, np.ones(len(batch)))
        return replace(plan, device=order) if self._by_device else replace(plan, lengths=half)


def test_device_verifies_proposals_before_filler():
    """A lookup finds something for a part of the requests only; the places of the others hold filler."""
    load = draw_closed_load(16, 48, LIFTED, None, np.random.default_rng(0), Lengths(300, 48))
    shares = {}
    for by_device in (True, False):
        engine = ReplayEngine(
            Setting(WORLD, LIFTED, POOL, Limits(), device_ranks=True), load, Half(by_device=by_device)
        )
        engine.run()
        assert (engine.requests.produced == load.output).all()
        shares[by_device] = sum(engine.log.verified) / sum(engine.log.requests)
    assert shares[True] > 1.2 * shares[False]
