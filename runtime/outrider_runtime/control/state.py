"""The controller's counters: the part of the pod's state that only the controller knows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.acceptance import Verdicts
from outrider_runtime.control.batch import Columns, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.plans import Nodes, Outcome
from outrider_runtime.control.step_times import Shape, this_step
from outrider_runtime.control.trials import ProbeCounts

RECENT_KEEP = 0.95
"""Weight of older steps at each new one: a mean over about the last 20 steps."""
REQUEST_STEPS, TRIED, VERIFIED, ACCEPTED = range(4)
"""Columns of a drafter's counters."""
LEAST_STEPS = 20
"""Fewest steps before speculation may be reported as not worth it."""
LEAST_PROBES = 3
"""Fewest probes that a speed-up is reported from: two may both be off by as much as machines drift."""
IDLE_S = 10.0
"""Seconds without a step after which there is no traffic."""


class Reason(StrEnum):
    """Values equal those of the state's `choice.reason`."""

    PAYS = "Pays"
    NOT_WORTH_IT = "NotWorthIt"
    OFF = "Off"
    NO_DRAFTER = "NoDrafter"
    NO_TRAFFIC = "NoTraffic"
    MEASURING = "Measuring"


class StepCounts(NamedTuple):
    """Counts of one finished step."""

    verified: int
    """Verified nodes."""
    accepted: int
    """Accepted nodes."""
    longest: int
    """Depth of the deepest of them."""
    decoding: int
    """Requests that decoded."""
    begun: int
    """Requests whose prefill it finished."""
    shape: Shape
    """Shape of the target's pass, without proposals."""


@dataclass(slots=True, eq=False)
class Tally:
    """Counters since the start. D drafters; lengths 0..K."""

    of_drafter: Ints
    """(D, 4): REQUEST_STEPS, (request, step) pairs in which the target scored at least one of the drafter's proposals;
    TRIED, nodes whose parent was accepted; VERIFIED nodes; ACCEPTED nodes."""
    lengths: Ints
    """(K+1,): (request, step) pairs by verification length."""
    users: Floats
    """(D,): requests that verified proposals of each drafter, as a moving average over steps."""
    steps: int = 0
    speculative_steps: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    batch_squared: int = 0
    """Sum over steps of the square of the requests that decoded."""
    batch_accepted: int = 0
    """Sum over steps of the requests that decoded x the step's accepted nodes."""
    batch_busy_s: float = 0.0
    """Sum over steps of the requests that decoded x the step's seconds without those of prompts."""
    prompt_busy_s: float = 0.0
    """Seconds that prompts took, by the model of step times: all of a step in which no request decoded."""
    proposed_tokens: int = 0
    dropped_steps: int = 0
    """Steps whose times were absurd."""
    last_step_at: float = 0.0
    recent_length: float = 0.0
    """Mean verification length of decoding requests, over about the last 20 steps."""
    recent_speculation: float = 0.0
    """Share of these steps in which speculation was the choice."""

    def observe(self, outcome: Outcome, ran: StepCounts, prompts_s: float) -> None:
        """Count a finished step. prompts_s: modelled seconds of its prompts, if requests decoded too."""
        verified, decoding = ran.verified, ran.decoding
        self.steps += 1
        self.output_tokens += outcome.tokens
        self.last_step_at = outcome.output_at_s if math.isfinite(outcome.output_at_s) else self.last_step_at
        step_s = outcome.step_s if math.isfinite(outcome.step_s) and outcome.step_s > 0 else 0.0
        self.busy_s += step_s
        self.batch_squared += int(decoding) ** 2
        self.batch_accepted += int(decoding) * int(ran.accepted)
        prompts_s = min(max(0.0, prompts_s), step_s) if decoding else step_s
        self.batch_busy_s += int(decoding) * (step_s - prompts_s)
        self.prompt_busy_s += prompts_s
        self.proposed_tokens += len(outcome.forest)
        self.speculative_steps += outcome.drafted
        if decoding:
            fresh = 1 - RECENT_KEEP
            self.recent_length += fresh * (verified / decoding - self.recent_length)
            self.recent_speculation += fresh * (any(outcome.draft_plan.passes.tolist()) - self.recent_speculation)


def new_tally(drafters: int, max_draft_tokens: int) -> Tally:
    return Tally(np.zeros((drafters, 4), np.int64), np.zeros(max_draft_tokens + 1, np.int64), np.zeros(drafters))


@compiled
def count(
    batch: Columns, nodes: Nodes, verdicts: Verdicts, of_drafter: Ints, lengths: Ints, users: Floats
) -> StepCounts:  # fmt: skip
    """Count a step. of_drafter, lengths, users: updated in place, see `Tally`."""
    users *= RECENT_KEEP
    verified, accepted, depths, decoding, begun = 0, 0, np.zeros(len(batch.slot), np.int64), 0, 0
    last = np.full(len(of_drafter), -1)  # request of each drafter's last node
    for m in np.flatnonzero(verdicts.verified):
        i, d = nodes.request[m], nodes.drafter[m]
        verified += 1
        accepted += verdicts.accepted[m]
        depths[i] = max(depths[i], nodes.depth[m])
        own = of_drafter[d]
        own[REQUEST_STEPS] += last[d] != i
        users[d] += (1 - RECENT_KEEP) * (last[d] != i)
        last[d] = i
        own[TRIED] += verdicts.tried[m]
        own[VERIFIED] += 1
        own[ACCEPTED] += verdicts.accepted[m]
    for i in range(len(batch.slot)):
        if batch.prompt[i] == 0 and batch.prompt_left[i] == 0:
            decoding += 1
            lengths[min(depths[i], len(lengths) - 1)] += 1
        begun += batch.prompt[i] > 0 and batch.prompt_left[i] == 0
    return StepCounts(verified, accepted, depths.max() if len(depths) else 0, decoding, begun, this_step(batch))


@dataclass(frozen=True, slots=True)
class DrafterState:
    """One drafter's counters since the start."""

    suspended: str = ""
    """Why it may not run, in a sentence; empty if it may."""
    request_steps: int = 0
    tried: int = 0
    verified: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class State:
    reason: Reason
    learning: bool
    """The target's costs are being learned, because no profile is loaded."""
    has_disabled_drafts: bool
    """Some drafter has not been chosen for a while, and so its cache is not fed."""
    probes: ProbeCounts
    tally: Tally
    decision_s: float
    drafters: dict[str, DrafterState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weighed:
    """The current estimates that a choice depends on, for a human reader. Tuples hold one entry per drafter."""

    token_s: float
    """Seconds that one more verified token costs the target."""
    rate: float
    """lambda, tokens per second."""
    brings: tuple[float, ...]
    """Expected accepted tokens of a first proposal, mean over the requests."""
    draft_s: tuple[float, ...]
    """Seconds of a first pass, or a call."""
