"""What the controller has counted: the part of the pod's state that only it knows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.acceptance.trials import Verdicts
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.model import Shape, this_step
from outrider_runtime.control.data.batch import Columns, Ints
from outrider_runtime.control.data.forest import Nodes
from outrider_runtime.control.data.plans import Outcome
from outrider_runtime.control.speedup import ProbeCounts

RECENT_KEEP = 0.95
"""Per step: about the last 20 steps."""
REQUEST_STEPS, TRIED, VERIFIED, ACCEPTED = range(4)
"""What is counted of each drafter."""
LEAST_STEPS = 20
"""Steps before which nothing is said about the worth of speculation."""
LEAST_PROBES = 3
"""Probes that a speed-up rests on at least; two may both be off by as much as machines drift."""
IDLE_S = 10.0
"""No step for so long means no traffic."""


class Reason(StrEnum):
    """Values equal those of the state's `choice.reason`."""

    PAYS = "Pays"
    NOT_WORTH_IT = "NotWorthIt"
    OFF = "Off"
    NO_DRAFTER = "NoDrafter"
    NO_TRAFFIC = "NoTraffic"
    MEASURING = "Measuring"


class StepCounts(NamedTuple):
    """A finished step, in a few numbers."""

    verified: int
    """Nodes."""
    longest: int
    """Depth of the deepest of them."""
    decoding: int
    """Requests that decoded."""
    begun: int
    """Requests whose prompts it finished."""
    shape: Shape
    """The target's pass, without proposals."""


@dataclass(slots=True, eq=False)
class Tally:
    """Counters since the start. D drafters; lengths 0..K."""

    of_drafter: Ints
    """(D, 4): (request, step) pairs in which the target scored at least one of its proposals; nodes whose parent was
    accepted; nodes verified; nodes accepted."""
    lengths: Ints
    """(K+1,): (request, step) pairs that verified so many proposals."""
    steps: int = 0
    speculative_steps: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    proposed_tokens: int = 0
    dropped_steps: int = 0
    """Steps whose times were absurd."""
    last_step_at: float = 0.0
    recent_length: float = 0.0
    """Mean verified length over about the last 20 steps' decoding requests."""
    recent_speculation: float = 0.0
    """Share of them whose choice was to speculate."""

    def observe(self, outcome: Outcome, ran: StepCounts) -> None:
        """Count a finished step."""
        verified, decoding = ran.verified, ran.decoding
        self.steps += 1
        self.output_tokens += outcome.tokens
        self.last_step_at = outcome.now if math.isfinite(outcome.now) else self.last_step_at
        self.busy_s += outcome.step_s if math.isfinite(outcome.step_s) and outcome.step_s > 0 else 0.0
        self.proposed_tokens += len(outcome.forest)
        self.speculative_steps += outcome.drafted
        if decoding:
            fresh = 1 - RECENT_KEEP
            self.recent_length += fresh * (verified / decoding - self.recent_length)
            self.recent_speculation += fresh * (any(outcome.draft_plan.passes.tolist()) - self.recent_speculation)


def new_tally(drafters: int, max_draft_tokens: int) -> Tally:
    return Tally(np.zeros((drafters, 4), np.int64), np.zeros(max_draft_tokens + 1, np.int64))


@compiled
def count(batch: Columns, nodes: Nodes, verdicts: Verdicts, of_drafter: Ints, lengths: Ints) -> StepCounts:
    """Count a step's nodes. of_drafter, lengths: see `Tally`."""
    verified, depths, decoding, begun = 0, np.zeros(len(batch.slot), np.int64), 0, 0
    last = np.full(len(of_drafter), -1)  # request of each drafter's last node
    for m in np.flatnonzero(verdicts.verified):
        i, d = nodes.request[m], nodes.drafter[m]
        verified += 1
        depths[i] = max(depths[i], nodes.depth[m])
        own = of_drafter[d]
        own[REQUEST_STEPS] += last[d] != i
        last[d] = i
        own[TRIED] += verdicts.tried[m]
        own[VERIFIED] += 1
        own[ACCEPTED] += verdicts.accepted[m]
    for i in range(len(batch.slot)):
        if batch.prompt[i] == 0 and batch.prompt_left[i] == 0:
            decoding += 1
            lengths[min(depths[i], len(lengths) - 1)] += 1
        begun += batch.prompt[i] > 0 and batch.prompt_left[i] == 0
    return StepCounts(verified, depths.max() if len(depths) else 0, decoding, begun, this_step(batch))


@dataclass(frozen=True, slots=True)
class DrafterState:
    """Counters since the start, of one drafter."""

    suspended: str = ""
    """Why it does not run, in a sentence; empty when it may."""
    request_steps: int = 0
    tried: int = 0
    verified: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class State:
    reason: Reason
    learning: bool
    """True while target coefficients are learned because no profile is loaded."""
    gated: bool
    """Some drafter that reads has not been chosen for a while: its cache is not fed."""
    probes: ProbeCounts
    tally: Tally
    decision_s: float
    drafters: dict[str, DrafterState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a choice depends on, by the estimates of the moment, for a human. Tuples are by drafter."""

    token_s: float
    """What one more verified token costs the target."""
    rate: float
    """lambda, tokens per second."""
    brings: tuple[float, ...]
    """Tokens that a first proposal is expected to bring, mean over the requests."""
    draft_s: tuple[float, ...]
    """Seconds of a first pass, or a call."""
