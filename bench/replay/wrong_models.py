"""Bar 4: static load with a profile that is wrong, or with times that miss a part of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from outrider_runtime.control.batch import Batch
from outrider_runtime.control.plans import DraftPlan, Forest, Outcome, VerifyPlan
from outrider_runtime.control.step_times import LatencyModel, StepCost
from outrider_runtime.simulate.replay.engine import Policy
from outrider_runtime.simulate.replay.workload import Ints

from bench.replay.bars import Bar, low, paired
from bench.replay.settings import System, ours
from bench.replay.static_load import Point, measure

LEAST = 0.95
KNEE_OFF, COST_FACTOR = 0.3, 1.5
MISSING = (0.05, 0.15)
"""Least and most of a step's device times that is not reported."""


def knee_off(latency: LatencyModel) -> LatencyModel:
    """The knee of every mode 30% later than it is."""
    factor = 1 + KNEE_OFF
    moved = {mode: replace(cost, knee_tokens=factor * cost.knee_tokens) for mode, cost in latency.target.items()}
    return replace(latency, target=moved)


def expensive_drafts(latency: LatencyModel) -> LatencyModel:
    """The profile says of every draft two thirds of what it costs."""
    drafters = {
        name: replace(
            cost, cost=_times(cost.cost, 1 / COST_FACTOR), first_pass=_times(cost.first_pass, 1 / COST_FACTOR)
        )
        for name, cost in latency.drafters.items()
    }
    return replace(latency, drafters=drafters)


def _times(cost: StepCost, factor: float) -> StepCost:
    values = {name: getattr(cost, name) * factor for name in StepCost.__dataclass_fields__ if name != "knee_tokens"}
    return replace(cost, **values)


@dataclass(frozen=True, slots=True)
class Unreported:
    """A policy that observes less time of each step's passes than they took. The step's own length is the wall
    clock's, and stays."""

    policy: Policy
    rng: np.random.Generator

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        return self.policy.plan_verify(batch, forest)

    def plan_draft(self, batch: Batch) -> DraftPlan:
        return self.policy.plan_draft(batch)

    def observe(self, outcome: Outcome) -> None:
        reported_share = 1 - self.rng.uniform(*MISSING)
        self.policy.observe(
            replace(outcome, target_s=reported_share * outcome.target_s, draft_s=reported_share * outcome.draft_s)
        )

    def release(self, slots: Ints) -> None:
        self.policy.release(slots)


def unreported(whole: System) -> System:
    return replace(
        whole, build=lambda case, seed: Unreported(whole.build(case, seed), np.random.default_rng([seed, 17]))
    )


def systems() -> Mapping[str, System]:
    return {
        "knee 30% off": ours(distort=knee_off),
        "drafts 1.5 times as expensive": ours(distort=expensive_drafts),
        "5 to 15% of each step not reported": unreported(ours()),
    }


def judge(point: Point, seeds: int) -> list[Bar]:
    """Compare with ours at the same points, with its own profile and complete times."""
    own = measure(point, ours(), range(seeds))
    return [
        Bar(
            f"4 wrong models, {name}", str(point), low(paired(measure(point, system, range(seeds)), own)), LEAST,
            "ours with its own profile", seeds,
        )
        for name, system in systems().items()
    ]  # fmt: skip
