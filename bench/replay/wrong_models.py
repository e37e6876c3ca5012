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

from bench.replay.bars import Bar, low_quantile, pair_ratios
from bench.replay.settings import System, loop_system
from bench.replay.static_load import Point, measure

LEAST = 0.95
KNEE_OFF, COST_FACTOR = 0.3, 1.5
MISSING = (0.05, 0.15)
"""Least and most of a step's device times that is not reported."""


def move_knee(latency: LatencyModel) -> LatencyModel:
    """Put the knee of every mode at 1.3 times its tokens."""
    factor = 1 + KNEE_OFF
    moved = {mode: replace(cost, knee_tokens=factor * cost.knee_tokens) for mode, cost in latency.target.items()}
    return replace(latency, target=moved)


def understate_drafts(latency: LatencyModel) -> LatencyModel:
    """Divide the cost of every draft in the profile by COST_FACTOR."""
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
    """A policy that observes less time of each step's passes than they took; the step's wall time stays as it is."""

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


def hide_times(whole: System) -> System:
    return replace(
        whole, build=lambda case, seed: Unreported(whole.build(case, seed), np.random.default_rng([seed, 17]))
    )


def systems() -> Mapping[str, System]:
    return {
        "knee 30% off": loop_system(distort=move_knee),
        "drafts 1.5 times as expensive": loop_system(distort=understate_drafts),
        "5 to 15% of each step not reported": hide_times(loop_system()),
    }


def judge(point: Point, seeds: int) -> list[Bar]:
    """Compare the loop with itself at the same point, with its own profile and complete times."""
    own = measure(point, loop_system(), range(seeds))
    return [
        Bar(
            name=f"4 wrong models, {name}",
            where=str(point),
            value=low_quantile(pair_ratios(measure(point, system, range(seeds)), own)),
            least=LEAST,
            against="ours with its own profile",
            seeds=seeds,
        )
        for name, system in systems().items()
    ]
