"""What passes between an engine and the core, apart from the batch. Order of calls for step t, in every engine:

    plan_verify(batch, forest)   before t is scheduled: which proposed nodes its target pass scores
    plan_draft(batch)            for the batch that t runs: which drafters propose at the end of t, for step t+1
    observe(outcome)             what came of t; with asynchronous scheduling, after the plans of t+1

A forest is what drafters proposed, as arrays over nodes: a chain is a tree of width 1.
Shapes: N requests, D drafters, M nodes, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import NO_DRAFTER, Batch, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled


class ExecutionMode(StrEnum):
    """How the engine runs a step; values equal those of the profile's modes."""

    UNIFORM = "uniform"
    """Every decoding request carries the same number of tokens, no prefill."""
    VARLEN = "varlen"
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


ROOT = -1
"""Parent of a node that follows the request's last committed token."""


class Nodes(NamedTuple):
    """The columns of a `Forest`, as compiled code takes them, and as an engine hands over trees that it holds."""

    request: Ints
    parent: Ints
    drafter: Ints
    depth: Ints
    rank: Ints
    confidence: Floats


_nodes = attrgetter(*Nodes._fields)


@dataclass(slots=True, eq=False)
class Forest:
    """Every real proposal of a step: no padding, and no token that a grammar rules out. A parent stands before its
    children. Treat it as immutable, like `Batch`."""

    request: Ints
    """(M,): row in `Batch`."""
    parent: Ints
    """(M,): number of the node that it follows; ROOT if it follows the last committed token."""
    drafter: Ints
    """(M,): number in the pool."""
    depth: Ints
    """(M,): 1 below ROOT."""
    rank: Ints
    """(M,): 0 for the most probable child of its parent among those proposed, 1 for the next one."""
    confidence: Floats
    """(M,): what the drafter says of the token, given its parent: log-odds for a model, tokens of the match for a
    lookup. NaN: not known, or not known yet (asynchronous scheduling plans by depth alone)."""
    drafter_order: Ints
    """(R, N): drafters that were scheduled for each request, in order of preference; NO_DRAFTER ends the order."""
    lengths: Ints
    """(D,): scheduled draft length of each drafter; 0: it did not run."""
    purpose: Purpose
    """Purpose of the draft plan that these proposals come from."""
    placeholders: Bools | None = None
    """(N,): the request's nodes are placeholders, since the engine has not yet reported what was proposed. None: every
    node is a real proposal."""

    def __len__(self) -> int:
        return len(self.request)

    @property
    def columns(self) -> tuple[Any, ...]:
        """Fields of `Nodes`, in a plain tuple: compiled calls unpack it faster than a named one."""
        return _nodes(self)


def trials(forest: Forest, verified: Bools, accepted: Bools) -> Bools:
    """(M,): `Outcome.tried` for an engine that knows nothing about nodes that were not verified."""
    return np.asarray(verified & ((forest.parent == ROOT) | accepted[forest.parent]))


def nothing_proposed(requests: int, drafters: int, purpose: Purpose = Purpose.CHOICE) -> Forest:
    """The forest of a step for which no drafter was scheduled."""
    none = np.zeros(0, dtype=np.int64)
    drafter_order = np.full((1, requests), NO_DRAFTER, dtype=np.int64)
    return Forest(none, none, none, none, none, np.zeros(0), drafter_order, np.zeros(drafters, np.int64), purpose)


def chains(
    lengths: Ints, drafter: Ints, plan: DraftPlan, drafter_order: Ints, confidence: NDArray[np.floating] | None = None
) -> Forest:
    """A forest of chains: `lengths` (N,) nodes for each request, proposed by its `drafter` (N,).

    plan: the plan that these proposals come from. drafter_order: `plan.drafter_order` (R, N'), its columns rearranged
    to this step's N requests. confidence: (M,), request after request; None: not known.
    """
    (request, parent, of, depth, rank), unknown = chain_nodes(lengths, drafter, np.zeros((len(lengths), 0)))
    known = unknown if confidence is None else confidence
    return Forest(request, parent, of, depth, rank, known, drafter_order, plan.passes, plan.purpose)


@compiled
def chain_nodes(lengths: Ints, drafter: Ints, confidence: Floats) -> tuple[Ints, Floats]:
    """(5, M): request, parent, drafter, depth and rank of each node; (M,): its confidence, NaN if it is not known.

    lengths, drafter: (N,); without a drafter there are no nodes. confidence: (N, K), of the chains' tokens."""
    count = 0
    for i in range(len(lengths)):
        count += lengths[i] if drafter[i] != NO_DRAFTER else 0
    nodes, said, m = np.zeros((5, count), np.int64), np.full(count, np.nan), 0
    for i in range(len(lengths)):
        for k in range(lengths[i] if drafter[i] != NO_DRAFTER else 0):
            nodes[0, m], nodes[1, m], nodes[2, m], nodes[3, m] = i, ROOT if k == 0 else m - 1, drafter[i], k + 1
            if k < confidence.shape[1]:
                said[m] = confidence[i, k]
            m += 1
    return nodes, said


@compiled
def drop_gaps(
    plan: tuple[Ints, Ints, Ints], fed_blocks: Bools, whole: Bools, reads: Bools, tokens: Ints
) -> tuple[Ints, Ints, Ints, Bools]:  # fmt: skip
    """A draft plan as it is carried out: its passes (D,), its order (R, N) without drafters that would propose over a
    KV gap, the step's tokens that each drafter is fed (D, N), and which drafters run (D,).

    plan: passes, drafter_order and feed of a `DraftPlan`. fed_blocks: (D,), block drafters that are fed in any case.
    whole: (D, N), the drafter's cache has no gap. reads: (D,), see `settings.Drafter`. tokens: (N,), the step's."""
    order, passes, feed, runs = plan[1].copy(), np.zeros_like(plan[0]), np.zeros_like(plan[2]), fed_blocks.copy()
    for d in range(len(passes)):
        runs[d] |= plan[2][d].any()
    for rank in range(order.shape[0]):
        for n in range(order.shape[1]):
            d = order[rank, n]
            if d != NO_DRAFTER and (plan[0][d] > 0 or runs[d]) and not whole[d, n]:
                order[rank, n] = NO_DRAFTER
            elif d != NO_DRAFTER:
                passes[d] = plan[0][d]
    for d in range(len(passes)):
        runs[d] |= passes[d] > 0
        if runs[d] and reads[d]:
            feed[d] = tokens
    return passes, order, feed, runs


@compiled
def step_tokens(tokens: Ints, prompt: Ints) -> tuple[int, bool]:
    """The tokens of a step, and whether every request decodes with the same number. tokens, prompt: (N,)."""
    uniform = len(tokens) > 0
    for i in range(len(tokens)):
        uniform &= tokens[i] == tokens[0] and prompt[i] == 0
    return tokens.sum(), uniform


@compiled
def chain_verdicts(request: Ints, depth: Ints, scored: Ints, sampled: Ints) -> Bools:
    """(3, M): fields `verified`, `accepted`, `tried` of `Outcome`.

    scored, sampled: (N,), proposals of each request that the target scored, and tokens that it got, the bonus token
    included."""
    verdicts = np.zeros((3, len(request)), np.bool_)
    for m in range(len(request)):
        most, got = scored[request[m]], sampled[request[m]]
        verdicts[0, m] = depth[m] <= most
        verdicts[1, m] = depth[m] <= min(most, got - 1)
        verdicts[2, m] = depth[m] <= min(most, got)
    return verdicts
