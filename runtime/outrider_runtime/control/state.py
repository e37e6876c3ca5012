"""What the controller has counted: the part of the pod's state that only it knows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from outrider_runtime.control.batch import Bools, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.plans import Outcome
from outrider_runtime.control.probes import ProbeCounts, Speedup

RECENT_KEEP = 0.95
"""Per step: about the last 20 steps."""
REQUEST_STEPS, TRIED, VERIFIED, ACCEPTED = range(4)
"""What is counted of each drafter."""
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
    running: int = 0
    """Requests in the last step."""
    last_step_at: float = 0.0
    recent_length: float = 0.0
    """Mean verified length over about the last 20 steps' decoding requests."""
    recent_speculation: float = 0.0
    """Share of them whose choice was to speculate."""

    def observe(self, outcome: Outcome) -> Ints:
        """Count a finished step. Returns (N,): verified nodes of each request."""
        forest, batch = outcome.forest, outcome.batch
        counts = _count_nodes(
            forest.request, forest.parent, forest.drafter, forest.depth, outcome.verified, outcome.accepted,
            len(batch), self.of_drafter,
        )  # fmt: skip
        verified, decoding = _count_lengths(counts, batch.prompt, batch.prompt_left, self.lengths)
        self.steps += 1
        self.output_tokens += outcome.tokens
        self.running = len(batch)
        self.last_step_at = outcome.now
        self.busy_s += outcome.step_s if math.isfinite(outcome.step_s) and outcome.step_s > 0 else 0.0
        self.proposed_tokens += len(forest)
        self.speculative_steps += verified > 0
        if decoding:
            fresh = 1 - RECENT_KEEP
            self.recent_length += fresh * (verified / decoding - self.recent_length)
            self.recent_speculation += fresh * ((outcome.draft_plan.draft_tokens > 0) - self.recent_speculation)
        return counts


def new_tally(drafters: int, max_draft_tokens: int) -> Tally:
    return Tally(np.zeros((drafters, 4), np.int64), np.zeros(max_draft_tokens + 1, np.int64))


@compiled
def _count_nodes(
    request: Ints, parent: Ints, drafter: Ints, depth: Ints, verified: Bools, accepted: Bools, requests: int,
    of_drafter: Ints,
) -> Ints:  # fmt: skip
    counts = np.zeros(requests, np.int64)
    for m in range(len(request)):
        if verified[m]:
            counts[request[m]] += 1
            own = of_drafter[drafter[m]]
            own[REQUEST_STEPS] += depth[m] == 1
            own[TRIED] += parent[m] < 0 or accepted[parent[m]]
            own[VERIFIED] += 1
            own[ACCEPTED] += accepted[m]
    return counts


@compiled
def _count_lengths(counts: Ints, prompt: Ints, prompt_left: Ints, lengths: Ints) -> tuple[int, int]:
    """Verified nodes, and requests that decode."""
    verified, decoding = 0, 0
    for i in range(len(counts)):
        verified += counts[i]
        if prompt[i] == 0 and prompt_left[i] == 0:
            decoding += 1
            lengths[min(counts[i], len(lengths) - 1)] += 1
    return verified, decoding


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
    """The last batch was too large for some drafter that reads: its cache is not fed."""
    goodput_tokens_per_s: float
    """lambda: measured goodput, smoothed."""
    speedup: Speedup | None
    """None while nothing can be said."""
    probes: ProbeCounts
    tally: Tally
    decision_s: float
    drafters: dict[str, DrafterState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a choice hangs on, by the estimates of the moment, for a human. Tuples are by drafter."""

    token_s: float
    """What one more verified token costs the target."""
    rate: float
    """lambda, tokens per second."""
    brings: tuple[float, ...]
    """Tokens that a first proposal is expected to bring, mean over the requests."""
    draft_s: tuple[float, ...]
    """Of a first pass, or a call."""
