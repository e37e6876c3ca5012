"""What the controller has counted: the part of the pod's state that only it knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from outrider_runtime.core.batch import Bools, Ints
from outrider_runtime.core.compiled import compiled
from outrider_runtime.core.plans import Outcome
from outrider_runtime.core.probes import Speedup

RECENT_KEEP = 0.95
"""Per step: about the last 20 steps."""
LEAST_STEPS = 20
"""Before so many steps nothing is said about the worth of speculation."""
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


@dataclass(slots=True, eq=False)
class Tally:
    """Counters since the start. D drafters; lengths 0..K."""

    request_steps: Ints
    """(D,): (request, step) pairs in which the target scored at least one of the drafter's proposals."""
    tried: Ints
    """(D,): nodes whose parent was accepted."""
    verified: Ints
    """(D,)"""
    accepted: Ints
    """(D,)"""
    lengths: Ints
    """(K+1,): (request, step) pairs that verified so many proposals."""
    steps: int = 0
    speculative_steps: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    proposed_tokens: int = 0
    dropped_steps: int = 0
    """Steps whose times were absurd."""
    running: int = 0
    """Requests in the last step."""
    last_step_at: float = 0.0
    recent_length: float = 0.0
    """Mean verified length over about the last 20 steps' decoding requests."""
    recent_speculation: float = 0.0
    """Share of them whose choice was to speculate."""

    def observe(self, outcome: Outcome, tried: Ints, counts: Ints, decoding: int) -> None:
        """tried: (D, 4) of the step: request steps, tried, verified, accepted. counts: (N,), verified nodes."""
        self.steps += 1
        self.output_tokens += outcome.tokens
        self.running = len(outcome.batch)
        self.last_step_at = outcome.now
        self.busy_s += outcome.step_s if np.isfinite(outcome.step_s) and outcome.step_s > 0 else 0.0
        self.proposed_tokens += len(outcome.forest)
        totals = (self.request_steps, self.tried, self.verified, self.accepted)
        for column, total in enumerate(totals):
            total += tried[:, column]
        verified = int(counts.sum())
        self.speculative_steps += verified > 0
        if not decoding:
            return
        self.lengths += np.bincount(np.minimum(counts, len(self.lengths) - 1), minlength=len(self.lengths))
        self.lengths[0] -= len(counts) - decoding
        fresh = 1 - RECENT_KEEP
        self.recent_length += fresh * (verified / decoding - self.recent_length)
        self.recent_speculation += fresh * ((outcome.draft_plan.draft_tokens > 0) - self.recent_speculation)


def new_tally(drafters: int, max_draft_tokens: int) -> Tally:
    request_steps, tried, verified, accepted = np.zeros((4, drafters), np.int64)
    return Tally(request_steps, tried, verified, accepted, np.zeros(max_draft_tokens + 1, np.int64))


@compiled
def count_nodes(
    request: Ints, parent: Ints, drafter: Ints, depth: Ints, verified: Bools, accepted: Bools, requests: int,
    drafters: int,
) -> tuple[Ints, Ints]:  # fmt: skip
    """(N,): verified nodes of each request; (D, 4): request steps, nodes tried, verified, accepted of each drafter."""
    counts, of_drafter = np.zeros(requests, np.int64), np.zeros((drafters, 4), np.int64)
    for m in range(len(request)):
        if verified[m]:
            counts[request[m]] += 1
            own = of_drafter[drafter[m]]
            own[0] += depth[m] == 1
            own[1] += parent[m] < 0 or accepted[parent[m]]
            own[2] += 1
            own[3] += accepted[m]
    return counts, of_drafter


@dataclass(frozen=True, slots=True)
class DrafterState:
    """Counters since the start, and the present estimates, of one drafter."""

    suspended: str = ""
    """Why it does not run, in a sentence; empty when it may."""
    request_steps: int = 0
    tried: int = 0
    verified: int = 0
    accepted: int = 0
    hazards: tuple[float, ...] = ()
    """Estimated probability that depth j+1 is accepted, given that those before it were."""
    hit_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class State:
    reason: Reason
    learning: bool
    """True while target coefficients are learned because no profile is loaded."""
    gated: bool
    """The last batch was too large for a drafter that reads: it does not run at all."""
    goodput_tokens_per_s: float
    """lambda: measured goodput, smoothed."""
    speedup: Speedup | None
    """None while nothing can be said."""
    tally: Tally
    decision_s: float
    drafters: dict[str, DrafterState] = field(default_factory=dict)
