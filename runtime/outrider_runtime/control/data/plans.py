"""What the core decides, and what came of it. Order of calls for step t, in every engine:

    plan_verify(batch, forest)   before t is scheduled: which proposed nodes its target pass scores
    plan_draft(batch)            for the batch that t runs: which drafters propose at the end of t, for step t+1
    observe(outcome)             what came of t; with asynchronous scheduling, after the plans of t+1

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
    VARLEN = "ragged"
    """Lengths differ, or a prefill chunk is in the step."""
    BEYOND_GRAPH = "beyondGraph"
    """More batched tokens than the largest captured graph."""


class Purpose(StrEnum):
    """Why a plan is what it is. The engine passes it on in `Forest` and `Outcome`."""

    CHOICE = "choice"
    """The best expected goodput."""
    PROBE = "probe"
    """k = 0, to measure plain decoding."""
    EXPLORE = "explore"
    """A short block with a drafter whose worth is uncertain."""
    SLO = "slo"
    """Keep late requests within their TPOT. It may cost goodput, so such steps do not measure goodput."""
    FIXED = "fixed"
    """Mode Static or Off, a pin, or no drafter that can run."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceOrder:
    """What the device needs to choose the proposals to verify, in an engine where it knows them before the host does.

    It ranks real proposals by weight x P(accepted with all before it); see `vllm_plugin.device_ranking`.
    """

    tokens: int
    """Proposals to verify, over all requests; never fewer than `forced` and never more than `caps` in all."""
    caps: Ints
    """(N,): most proposals to verify for each request; their sum fits token budget and free KV."""
    forced: Ints
    """(N,): real proposals to verify for each request whatever their rank, because its SLO class needs them."""
    weights: Floats
    """(N,): P(first proposal accepted) of the request / the mean over its drafter's requests; multiplies the score that
    its proposals are ranked by."""
    arm: Ints | None = None
    """(N,): see `Batch.arm`; a proposal is ranked among those of its arm. None: among all proposals."""
    arm_tokens: tuple[int, ...] = ()
    """`tokens` of each arm; they sum to `tokens`."""


@dataclass(frozen=True, slots=True, eq=False)
class VerifyPlan:
    """Which proposed nodes the step's target pass scores."""

    nodes: Bools
    """(M,): nodes to score; a node only together with its parent. They fit the batch's token budget and free KV."""
    lengths: Ints
    """(N,): verification length of each request."""
    purpose: Purpose
    token_budget: int | None = None
    """Most tokens that the step may batch, so that prompts break no TPOT; None: as many as the engine takes."""
    admit: int | None = None
    """Most waiting requests that may start in this step; None: as many as the engine takes."""
    device: DeviceOrder | None = None
    """The order for an engine whose device chooses the proposals. None: `lengths` are final."""


@dataclass(frozen=True, slots=True, eq=False)
class ArmPlan:
    """What was planned for one arm of a draft canary, as if it owned the whole batch."""

    arm: int
    passes: Ints
    """(D,): `DraftPlan.passes` for the arm's requests alone."""
    purpose: Purpose


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlan:
    """What to propose at the end of the step. k = 0 where `passes` are all 0."""

    passes: Ints
    """(D,): draft length of each drafter, for the requests that use it; 0: it proposes nothing. For an autoregressive
    drafter also its number of passes, and the depth of its trees."""
    widths: Ints
    """(D,): most nodes that each drafter proposes at a depth; 1: a chain. Never above its `settings.Drafter.widest`."""
    drafter_order: Ints
    """(R, N): drafters that each request uses, in order of preference: the first that has a proposal counts. NO_DRAFTER
    ends the order."""
    feed: Ints
    """(D, N): how many of the `Batch.missing` tokens, from the first one on, the drafter runs over before it proposes.
    A drafter with passes is fed all that it lacks of the requests that use it. All 0: it does not run."""
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

    output_at_s: float
    """Monotonic seconds at which its output arrived."""
    step_s: float
    """Wall time: `t_out(n) - max(t_out(n-1), t_sched(n))`."""
    target_s: float
    """Seconds of the target's forward pass and sampling, measured on the device; NaN: unknown, `step_s` less the drafts
    stands for it."""
    draft_s: Floats
    """(D,): seconds of each drafter at the end of this step, measured on the device; NaN: unknown, or it did not
    run."""
    mode: ExecutionMode
    tokens: int
    """Tokens that reached users."""
    batch: Batch
    """The N requests that the step ran: the argument of `plan_draft`."""
    draft_plan: DraftPlan
    verify_purpose: Purpose
    """Purpose of the step's `VerifyPlan`."""
    forest: Forest
    """Proposals that waited for this step; its `request` column holds rows of `batch`."""
    verified: Bools
    """(M,): nodes that the target scored."""
    accepted: Bools
    """(M,): nodes whose tokens the request kept; each only together with its parent."""
    tried: Bools
    """(M,): nodes whose parent was accepted and whose verdict is known, since the target's own token is: this may hold
    for a node that was not verified."""
    places: Ints | None = None
    """(N,): proposals and placeholders that the target scored for each request. None: the `verified` nodes."""

    @property
    def scored_tokens(self) -> int:
        """Proposals and placeholders that the target scored, over all requests."""
        return int(np.count_nonzero(self.verified) if self.places is None else self.places.sum())

    @property
    def drafted(self) -> bool:
        """Drafters ran for this step, whether they had proposals or not."""
        return bool(self.forest.lengths.any())
