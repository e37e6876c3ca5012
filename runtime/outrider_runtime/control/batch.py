"""What passes between an engine and the controller at every step. All values are immutable.

Order of calls for step t, in synchronous and asynchronous scheduling alike:

    plan_verify(batch before scheduling t)   lengths of the proposals that t's target pass scores
    plan_draft(batch that t runs)            tokens K to propose at the end of t, for step t+1
    observe(outcome of t)                    later; in async scheduling after the plans of t+1

A chain is a token tree of width 1: a plan says how many nodes of a request's chain are used; a tree engine adds
fields for depth, width and node sets and keeps these calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class ExecutionMode(StrEnum):
    """How the engine runs a step; values equal those of the profile's modes."""

    UNIFORM = "uniform"
    """Every decoding request carries the same number of tokens, no prefill."""
    RAGGED = "ragged"
    """Lengths differ, or a prefill chunk is in the step."""
    BEYOND_GRAPH = "beyondGraph"
    """More batched tokens than the largest captured graph."""


class Purpose(StrEnum):
    """Why a plan is what it is; travels through the engine back into `StepOutcome`."""

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


OF_THIS_STEP = 2
"""Tokens that a request gets in any case before one of its proposals counts: this step's, and the bonus token."""


class RequestView(NamedTuple):
    """One running request. A NamedTuple, not a data class: a batch of 64 is built at every step."""

    id: str
    slo_class: str | None
    context_tokens: int
    """Tokens whose KV is cached before this step."""
    prefill_tokens: int
    """Prompt tokens that this step computes; 0 when the request decodes."""
    prefill_left: int
    """Prompt tokens that remain after this step; 0 means that it decodes in the next step."""
    output_tokens: int
    """Tokens already given to the user."""
    remaining_tokens: int
    """Tokens it may still produce from here on (max_tokens and the model's length limit)."""
    elapsed_s: float
    """Seconds since its first token; 0 before that."""
    proposed: int = 0
    """Real proposals awaiting verification (plan_verify) or verified in this step (plan_draft). In async
    scheduling of a neural draft: the placeholders."""
    drafter: str | None = None
    """Who made those proposals."""
    draft_ready: bool = False
    """The neural draft's KV covers the request's context without a hole (so true for one whose prompt begins)."""
    draft_hole: int = 0
    """Tokens at the end of its context that the neural draft has not seen; 0: none, or none to catch up on now."""


class Waiting(NamedTuple):
    """The request that is let in next."""

    slo_class: str | None
    prompt_tokens: int
    """Not cached."""
    remaining_tokens: int
    """Tokens that it may produce."""
    overdue: bool = False
    """It has waited as long as its class bears."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The running requests of one decision."""

    requests: tuple[RequestView, ...]
    now: float
    """Monotonic seconds."""
    token_budget: int
    """Batched tokens that one step may hold (max_num_batched_tokens)."""
    free_kv_tokens: int
    """Tokens that still fit into the KV cache, beyond what running requests hold."""
    next: Waiting | None = None
    """Who waits to be let in (plan_verify); None for nobody."""
    waiting: int = 0
    """Requests that wait and will have a place once it is free for them, `next` among them (plan_draft)."""
    patience_used: float = 0.0
    """Largest share of the time which its class bears that a prompt has waited or been read for (plan_verify)."""

    def stands(self) -> Iterator[tuple[str | None, float, int]]:
        """Class, seconds elapsed and tokens given, of each request."""
        return ((view.slo_class, view.elapsed_s, view.output_tokens) for view in self.requests)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What to propose at the end of the step."""

    draft_tokens: int
    """K: 0 for no proposals, else the most tokens that any drafter proposes for a request."""
    drafters: tuple[str | None, ...]
    """Aligned with `Batch.requests`; None: nothing is proposed for this request. All None when K is 0."""
    run_neural: bool
    """Whether the neural draft's forward runs at all, for the whole batch."""
    prefill_draft: bool
    """Whether prompt tokens of this step go through the draft; only when run_neural."""
    neural_tokens: int = 0
    """Passes of the neural draft that propose: at most draft_tokens, as each costs time. It stands in for lookups that
    find nothing; its proposals for other requests are dropped. 0: it runs its first pass only, so that its KV stays
    whole, and proposes nothing."""
    purpose: Purpose = Purpose.CHOICE
    catch_up: Mapping[str, int] = field(default_factory=dict)
    """Request -> tokens, from the beginning of its hole on, that the neural draft runs over before it proposes. One
    whose hole this closes may be proposed for in the same step."""


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """How many proposals the step's target pass scores."""

    lengths: tuple[int, ...]
    """Aligned with `Batch.requests`: 0 <= length <= proposed, and <= remaining_tokens - 1."""
    purpose: Purpose = Purpose.CHOICE
    """Purpose of the draft plan that made the proposals; SLO where classes changed the lengths."""
    token_budget: int | None = None
    """Most tokens that the step may batch, so that prompts break no TPOT; None: as many as the engine takes."""
    admit: int | None = None
    """Most waiting requests that may start in this step; None: as many as the engine takes."""


class Miss(NamedTuple):
    """A drafter that was asked first, and found nothing."""

    drafter: str
    asked: int


class RequestOutcome(NamedTuple):
    """One decoding request of a finished step."""

    id: str
    slo_class: str | None
    drafter: str | None
    """Who proposed at the end of the step before, or was asked to."""
    asked: int
    """Tokens that it was asked for."""
    proposed: int
    """Real proposals that came back: no padding (-1), not the zero drafts that vLLM gives a whole batch when one
    request nears max_model_len, not those a grammar ruled out."""
    verified: int
    """Real proposals that the target scored; at most `proposed`."""
    accepted: int
    """Proposals accepted; at most `verified`."""
    missed: Miss | None = None
    """The lookup that the neural drafter stood in for."""

    @property
    def tried(self) -> int:
        """Trials of acceptance: positions up to and with the first rejection."""
        return min(self.verified, self.accepted + 1)


class CatchUpOutcome(NamedTuple):
    """The draft-only forward over holes in the draft's KV at the end of a step."""

    tokens: int
    n_requests: int
    n_context: int
    """Tokens before the holes, summed over the requests."""
    n_context_query: float
    """Sum over requests of tokens before the hole x tokens caught up, divided by 1000."""
    seconds: float
    """Measured in the worker; NaN when unknown."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One finished step that ran the model."""

    now: float
    """Monotonic seconds at which its output arrived."""
    step_s: float
    """Wall time: `t_out(n) - max(t_out(n-1), t_sched(n))`."""
    target_s: float
    """Target forward with sampling, measured in the worker; NaN when unknown (then step_s less draft_s)."""
    n_context: int
    """Cached tokens before the step, summed over its requests."""
    n_batched: int
    """Tokens in the target's forward pass."""
    n_requests: int
    n_decoding: int
    """Of these, without prompt tokens."""
    mode: ExecutionMode
    tokens: int
    """Tokens that reached users."""
    verify_plan: VerifyPlan
    draft_plan: DraftPlan
    """The two plans that this step ran under, as the controller returned them."""
    requests: tuple[RequestOutcome, ...] = ()
    """Decoding requests that somebody was asked for; of the others there is nothing to learn."""
    draft_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per drafter that ran at the end of this step, measured in the worker; absent: did not run."""
    n_context_query: float = 0.0
    """Sum over requests of context x query tokens, divided by 1000."""
    prefill_tokens: int = 0
    """Prompt tokens in the step; 0 means pure decoding."""
    catch_up: CatchUpOutcome | None = None
    """None: none ran, or it failed. Its time is not in `draft_s`."""
