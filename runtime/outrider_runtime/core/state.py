"""What the controller has counted: the part of the pod's state that only it knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from outrider_runtime.core.batch import Bools, Ints
from outrider_runtime.core.forest import Forest
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
        for total, news in zip(
            (self.request_steps, self.tried, self.verified, self.accepted), tried.T, strict=True
        ):  # fmt: skip
            total += news
        verified = int(counts.sum())
        self.speculative_steps += verified > 0
        if not decoding:
            return
        self.lengths += np.bincount(np.minimum(counts, len(self.lengths) - 1), minlength=len(self.lengths))
        self.lengths[0] -= len(counts) - decoding
        fresh = 1 - RECENT_KEEP
        self.recent_length += fresh * (verified / decoding - self.recent_length)
        self.recent_speculation += fresh * (bool(outcome.draft_plan.passes.any()) - self.recent_speculation)


def new_tally(drafters: int, max_draft_tokens: int) -> Tally:
    request_steps, tried, verified, accepted = np.zeros((4, drafters), np.int64)
    return Tally(request_steps, tried, verified, accepted, np.zeros(max_draft_tokens + 1, np.int64))


def counts_by_drafter(forest: Forest, tried: Bools, verified: Bools, accepted: Bools, drafters: int) -> Ints:
    """(D, 4): request steps, nodes tried, verified and accepted of each drafter."""
    first = verified & (forest.depth == 1)
    columns = [np.bincount(forest.drafter[mask], minlength=drafters) for mask in (first, tried, verified, accepted)]
    return np.stack(columns, axis=1)


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
