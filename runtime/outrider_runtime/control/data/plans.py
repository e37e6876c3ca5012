"""What the core decides, and what came of it. Order of calls for step t, in every engine:

    plan_verify(batch, forest)   before t is scheduled: which proposed nodes its target pass scores
    plan_draft(batch)            for the batch that t runs: who proposes at the end of t, for step t+1
    observe(outcome)             of t; in asynchronous scheduling after the plans of t+1

Shapes: N requests, D drafters, M nodes, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from outrider_runtime.control.data.batch import Batch, Bools, Floats, Ints

if TYPE_CHECKING:
    from outrider_runtime.control.data.forest import Forest


class ExecutionMode(StrEnum):
    """How the engine runs a step; values equal those of the profile's modes."""

    UNIFORM = "uniform"
    """Every decoding request carries the same number of tokens, no prefill."""
    RAGGED = "ragged"
    """Lengths differ, or a prefill chunk is in the step."""
    BEYOND_GRAPH = "beyondGraph"
    """More batched tokens than the largest captured graph."""


class Purpose(StrEnum):
    """Why a plan is what it is; travels through the engine in `Forest` and `Outcome`."""

    CHOICE = "choice"
    """The best expected goodput."""
    PROBE = "probe"
    """k = 0 to measure what plain decoding would do."""
    EXPLORE = "explore"
    """A short block with a drafter whose worth is uncertain."""
    SLO = "slo"
    """What keeps requests that are behind within their TPOT; it may cost goodput, so it is no measure of it."""
    FIXED = "fixed"
    """Mode Static or Off, a pin, or no drafter that can run."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOrder:
    """What a device needs to choose the proposals that are verified, where it knows them before the host does.

    It ranks real proposals by weight x P(accepted with all before it); see `vllm_plugin.device_ranking`.
    """

    tokens: int
    """Proposals to verify, over all requests; never fewer than `forced` and never more than `caps` in all."""
    caps: Ints
    """(N,): most proposals to verify for each request; in all no more than token budget and free KV hold."""
    forced: Ints
    """(N,): proposals to verify for each request whatever their rank, if they are real: an SLO class needs them."""
    weights: Floats
    """(N,): P(first proposal accepted) of the request / that of its drafter's requests; the rank's factor."""
    arm: Ints | None = None
    """(N,): see `Batch.arm`; a proposal is ranked among those of its arm. None: among all."""
    arm_tokens: tuple[int, ...] = ()
    """Parts of `tokens`, by arm."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifyPlan:
    """Which proposed nodes the step's target pass scores."""

    nodes: Bools
    """(M,): a node only with its parent. Never more than the batch's token budget and free KV hold."""
    lengths: Ints
    """(N,): how many that makes of each request."""
    purpose: Purpose
    token_budget: int | None = None
    """Most tokens that the step may batch, so that prompts break no TPOT; None: as many as the engine takes."""
    admit: int | None = None
    """Most waiting requests that may start in this step; None: as many as the engine takes."""
    device: DeviceOrder | None = None
    """The order for an engine whose device chooses the proposals; `lengths` are final in any other. None: all that
    `lengths` schedule is verified."""


@dataclass(frozen=True, slots=True, eq=False)
class ArmPlan:
    """What one arm of a draft canary was planned for, as if the whole batch were its own."""

    arm: int
    passes: Ints
    """(D,): see `DraftPlan.passes`; for the arm's requests alone."""
    purpose: Purpose


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlan:
    """What to propose at the end of the step. k = 0 where `passes` are all 0."""

    passes: Ints
    """(D,): tokens that each drafter proposes for the requests that ask it; 0: it proposes nothing. For a drafter whose
    every token is a pass, its number of passes, and the depth of its trees."""
    widths: Ints
    """(D,): most nodes that each drafter proposes at a depth; 1: a chain. Never above its `settings.Drafter.widest`."""
    asked: Ints
    """(R, N): drafters that each request asks, in this order: the first that has a proposal counts. NOBODY ends the
    order."""
    feed: Ints
    """(D, N): of `Batch.missing`, the tokens, from the first missing one on, that the drafter runs over before it
    proposes. A drafter with passes is fed whatever it misses of the requests that ask it. All 0: it does not run."""
    purpose: Purpose
    arms: tuple[ArmPlan, ...] = ()
    """One for each arm that has requests in the batch; none without a canary."""

    @property
    def draft_tokens(self) -> int:
        """K: the longest proposal of any drafter."""
        return int(self.passes.max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One finished step that ran the model."""

    now: float
    """Monotonic seconds at which its output arrived."""
    step_s: float
    """Wall time: `t_out(n) - max(t_out(n-1), t_sched(n))`."""
    target_s: float
    """Target forward with sampling, measured on the device; NaN when unknown (then step_s less the drafts)."""
    draft_s: Floats
    """(D,): seconds of each drafter at the end of this step, measured on the device; NaN: unknown, or it did not
    run."""
    mode: ExecutionMode
    tokens: int
    """Tokens that reached users."""
    batch: Batch
    """As given to `plan_draft`: the N requests that the step ran."""
    draft_plan: DraftPlan
    verify_purpose: Purpose
    """Of the step's `VerifyPlan`."""
    forest: Forest
    """What waited for this step, with `request` in rows of `batch`."""
    verified: Bools
    """(M,): nodes that the target scored."""
    accepted: Bools
    """(M,): nodes whose tokens the request kept; each only with its parent."""
    tried: Bools
    """(M,): nodes whose parents were accepted, and where the target's own token is known: it may be for a node that was
    not verified."""
    places: Ints | None = None
    """(N,): tokens of each request that the target scored beyond its own, placeholders without a proposal included.
    None: the `verified` nodes."""

    @property
    def scored_tokens(self) -> int:
        """Proposals and placeholders that the target scored."""
        return int(np.count_nonzero(self.verified) if self.places is None else self.places.sum())

    @property
    def drafted(self) -> bool:
        """Drafters were asked for this step, whether they had proposals or not."""
        return bool(self.forest.lengths.any())
