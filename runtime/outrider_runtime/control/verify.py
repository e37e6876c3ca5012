"""Which waiting proposals the target scores in the next step, and which prompts and requests are held back.

One selection serves chains and trees, one drafter or several. Nodes are ranked by path probability (of a node and all
nodes above it) less what the node costs beyond the target's price of a token. A child's path is never likelier than its
parent's, so every prefix of the ranking is a set of subtrees. The plan is the prefix of the highest worth under the
cost with its knee. No other set of as many nodes gains more (AdaServe lemma A.2), so it is the best of all plans.

With asynchronous scheduling, a step is scheduled before the device has drafted for it. If the device chooses the
proposals, it gets an order (`DeviceOrder`): how many, and what it cannot know itself. The host then knows hit rates
and each request's acceptance; the device knows which proposals are real.

Shapes: N requests, M nodes, D drafters, K depths, R ranks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control import step_times
from outrider_runtime.control.acceptance import BONUS_TOKEN, Counts, chain_paths, node_paths
from outrider_runtime.control.admission import ANY_NUMBER, Pace, Queue, admissions, token_budget
from outrider_runtime.control.batch import NO_CLASS, NO_DRAFTER, Batch, Bools, Columns, Floats, Ints, Waiting
from outrider_runtime.control.compiled import borrowed, compiled
from outrider_runtime.control.draft_options import StepLimits, step_limits
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.plans import DeviceOrder, Forest, Nodes, Purpose, VerifyPlan
from outrider_runtime.control.settings import InForce
from outrider_runtime.control.slo import UnderWay, anyone_late, behind, clocks, forced_nodes, longest_step_s, needed
from outrider_runtime.control.step_times import Costs, Shape, room, this_step, without_prompts
from outrider_runtime.control.value import Price, worth

NO_NODES: Bools = np.zeros(0, dtype=bool)
NO_PLACEHOLDERS: Bools = np.zeros(0, dtype=bool)
ROUNDING = 1e-9
NOTHING, WHATEVER_FITS, WHAT_PAYS = range(3)
"""Which proposals are scored."""


class Verify:
    def __init__(self, evidence: Evidence, force: InForce, under_way: UnderWay, *, device_ranks: bool = False) -> None:
        """device_ranks: see `Settings`."""
        self._evidence, self.force, self._under_way = evidence, force, under_way
        self.device_ranks = device_ranks

    def plan(self, batch: Batch, forest: Forest) -> VerifyPlan:
        if not len(forest) and not self.force.has_classes:
            self._under_way.verifies_nothing()
            return VerifyPlan(NO_NODES, np.zeros(len(batch), np.int64), forest.purpose)
        evidence, force = self._evidence, self.force
        limits = step_limits(batch, force, self._under_way.lambda_over_plain, self._under_way, force.most_tokens)
        queue = _queue(batch, admits=force.has_classes and force.hot.admission)
        scoring_rule = self._scoring_rule(forest)
        placeholders = NO_PLACEHOLDERS if forest.placeholders is None else forest.placeholders
        waiting = (
            forest.columns, forest.lengths, np.ascontiguousarray(forest.drafter_order), placeholders,
            self.device_ranks, scoring_rule,
        )  # fmt: skip
        known = evidence.acceptance.columns, evidence.latency.columns
        made = _verify(batch.columns, waiting, known, limits, queue)
        purpose = Purpose.SLO if made.for_slo else forest.purpose
        tokens, admitted = (None if most == ANY_NUMBER else most for most in (made.token_budget, made.admit))
        device = self._device_order(batch, forest, scoring_rule, made)
        return VerifyPlan(made.nodes, made.lengths, purpose, tokens, admitted, device)

    def _device_order(self, batch: Batch, forest: Forest, scoring_rule: int, made: Scoring) -> DeviceOrder | None:
        """The order for the device; None if the host's lengths are final."""
        if not self.device_ranks or scoring_rule == NOTHING:
            return None
        caps = made.lengths
        if scoring_rule == WHAT_PAYS:
            usable = forest.request[forest.depth < batch.left[forest.request]]
            widest = np.bincount(usable, minlength=len(batch))
            most = room(this_step(Columns(*batch.columns)), batch.token_budget, batch.free_kv_tokens)
            caps = widest if widest.sum() <= most else made.lengths
        return DeviceOrder(min(made.tokens, int(caps.sum())), caps, made.forced, made.weights)

    def _scoring_rule(self, forest: Forest) -> int:
        if self.force.is_silent:
            return NOTHING
        return WHAT_PAYS if forest.purpose in (Purpose.CHOICE, Purpose.SLO) else WHATEVER_FITS


NO_ONE = Waiting(NO_CLASS, 0, 0)


class WaitingNodes(NamedTuple):
    """Proposals that wait for verification, and which of them may be scored."""

    nodes: tuple[Any, ...]
    """Fields of `Nodes`, in a plain tuple: compiled calls unpack it faster than a named one."""
    draft_lengths: Ints
    """(D,): `Forest.lengths`"""
    drafter_order: Ints
    """(R, N): `Forest.drafter_order`"""
    placeholders: Bools
    """(N,): requests with placeholders; empty for none."""
    device_ranks: bool
    """See `Settings`. If not, a placeholder costs a token whether it holds a proposal or not."""
    scoring_rule: int
    """NOTHING, WHATEVER_FITS or WHAT_PAYS."""


class Scoring(NamedTuple):
    nodes: Bools
    lengths: Ints
    for_slo: bool
    """Some request is late: goodput alone might have chosen otherwise."""
    token_budget: int
    admit: int
    forced: Ints
    """(N,): see `DeviceOrder`."""
    tokens: int
    """Number of proposals for a device that ranks to verify."""
    weights: Floats
    """(N,): see `DeviceOrder`. The fields without a text: see `VerifyPlan`."""


class NodePaths(NamedTuple):
    """Path probabilities of nodes: P(a node and all nodes above it are accepted). All (M,)."""

    ranked: Floats
    """Value that ranks a node. If the device ranks: given that the placeholder holds a proposal."""
    expected: Floats
    """Value that counts in sums: a placeholder counts times P(it holds a proposal)."""
    real: Floats
    """P(the node costs a token). If the device ranks, only a placeholder that holds a proposal does."""


def _queue(batch: Batch, *, admits: bool) -> tuple[Any, ...]:
    """Fields of `Queue`."""
    return admits, batch.next is not None, batch.patience_used, *(batch.next or NO_ONE)


@compiled
def _accepted_lengths(paths: Floats, request: Ints, nodes: Bools, requests: int) -> Floats:
    """(N,): tokens that each request is expected to get beyond its bonus token."""
    return np.asarray(np.bincount(request[nodes], weights=paths[nodes], minlength=requests), np.float64)


@compiled
def _verify(
    columns: tuple[Any, ...], waiting: tuple[Any, ...], known: tuple[tuple[Any, ...], tuple[Any, ...]],
    limit_fields: tuple[Any, ...], queue: tuple[Any, ...],
) -> Scoring:  # fmt: skip
    """Choose the nodes to score and the requests to admit, and set the tokens that requests are expected to get.

    columns, waiting, limit_fields, queue: fields of `Columns`, `WaitingNodes`, `StepLimits`, `Queue`. known: those of
    `Counts` and `Costs`.
    """
    batch, forest = borrowed(Columns(*columns)), borrowed(WaitingNodes(*waiting))
    limits, waits = borrowed(StepLimits(*limit_fields)), Queue(*queue)
    proposed, counts, costs = Nodes(*forest.nodes), borrowed(Counts(*known[0])), borrowed(Costs(*known[1]))
    base, requests, for_slo, request = this_step(batch), len(batch.slot), False, proposed.request
    nodes, forced = np.zeros(len(request), np.bool_), np.zeros(len(request), np.bool_)
    accepted: Floats = np.zeros(requests)
    weights: Floats = np.ones(requests)
    proposals, tokens = 0.0, 0
    if forest.scoring_rule == WHAT_PAYS and len(request):
        paths = paths_to_score(counts, batch, forest)
        nodes, for_slo, forced, step_prices = _best(batch, proposed, forest.draft_lengths, paths, costs, base, limits)
        accepted, proposals = _accepted_lengths(paths.expected, request, nodes, requests), (paths.real * nodes).sum()
        if forest.device_ranks:
            real = _real_proposals(proposed, nodes, paths, requests)
            tokens = max(forced.sum(), _worth_verifying(real, step_prices, nodes.sum()))
            weights = _weights(counts, proposed, paths.ranked, requests)
    elif forest.scoring_rule == WHATEVER_FITS:
        nodes = _whatever_fits(proposed, batch.left, room(base, limits.token_budget, limits.free_kv_tokens))
        tokens = nodes.sum()
        proposals = float(tokens)
    lengths = np.bincount(request[nodes], minlength=requests)
    limits.expected[batch.slot] = accepted
    budget = admit = ANY_NUMBER
    if waits.admits and (waits.has_waiting or base.n_prompt > 0.0):
        alone, rows = without_prompts(base), np.flatnonzero(batch.prompt + batch.prompt_left == 0)
        read_s = 0.0
        if limits.drafts_s > 0.0:
            read_s = step_times.draft_columns(costs, batch.context[rows], 0.0, 1)[2].sum()
        state = clocks(batch, rows, limits.tpots_s)
        pace = Pace(state, alone, proposals, 1.0 + accepted[rows], limits.drafts_s, read_s)
        budget = token_budget(limits.token_budget, waits, pace, costs)
        admit = admissions(batch, waits, pace, costs, limits.tpots_s)
    forced_lengths = np.bincount(request[forced], minlength=requests)
    return Scoring(nodes, lengths, for_slo, budget, admit, forced_lengths, tokens, weights)


@compiled
def paths_to_score(counts: Counts, batch: Columns, forest: WaitingNodes) -> NodePaths:
    """Paths of the nodes. A placeholder's proposal is not known: its request's drafters are tried in their order, with
    hit rates h and acceptance rates a, for depth k = 1, 2, ..:

    real = h1[k] + (1 - h1[1]) * h2[k],    expected = h1[k] * prod(a1) + (1 - h1[1]) * h2[k] * prod(a2)
    """
    nodes, lengths = Nodes(*forest.nodes), forest.draft_lengths
    ranked, real = node_paths(counts, batch, nodes), np.ones(len(nodes.request))
    if not forest.placeholders.any():
        return NodePaths(ranked, ranked, real)
    rows, limit = np.arange(len(batch.slot)), min(lengths.max(), counts.acceptance_rates.shape[1])
    chains, hits = chain_paths(counts, batch, rows, lengths > 0, limit, BONUS_TOKEN)
    expected = ranked.copy()
    for m in range(len(real)):
        i, k = nodes.request[m], nodes.depth[m] - 1
        if not forest.placeholders[i]:
            continue
        path, is_real, reach = 0.0, 0.0, 1.0
        for d in forest.drafter_order[:, i]:
            if d != NO_DRAFTER and lengths[d] > 0:
                hit = reach * hits[d, k] if k < lengths[d] else 0.0
                path, is_real, reach = path + hit * chains[d, k, i], is_real + hit, reach * (1.0 - hits[d, 0])
        expected[m] = path
        real[m] = is_real if forest.device_ranks else 1.0
    return NodePaths(ranked if forest.device_ranks else expected, expected, real)


@compiled
def _whatever_fits(proposed: Nodes, left: Ints, room: int) -> Bools:
    """(M,): as many nodes as fit, from the first request on, whatever they do to goodput. left: (N,), see `Batch`."""
    nodes, count = np.zeros(len(proposed.request), np.bool_), 0
    for m in range(len(nodes)):
        if proposed.depth[m] < left[proposed.request[m]]:
            count += 1
            nodes[m] = count <= room
    return nodes


@compiled
def _best(
    batch: Columns,
    proposed: Nodes,
    draft_lengths: Ints,
    paths: NodePaths,
    costs: Costs,
    base: Shape,
    limits: StepLimits,
) -> tuple[Bools, bool, Bools, Floats]:
    """(M,) nodes to score, whether some are scored for late requests, (M,) those that are, and the prices in tokens of
    a step with 0, 1, .. proposals."""
    request, requests, (ranked, expected, real) = proposed.request, len(batch.slot), paths
    budget = room(base, limits.token_budget, limits.free_kv_tokens)
    alone, most, nothing = without_prompts(base), min(budget, len(ranked)), np.zeros(len(ranked), np.bool_)
    read_s = step_times.read_s(costs, draft_lengths, alone.n_requests)
    node_s = step_times.node_s(costs, batch.context, read_s)
    price = step_times.price(costs, base, node_s, limits.lambda_over_plain, most)
    nodes, step_prices = select(ranked, request, price, budget, nothing, np.inf).nodes, price.rate * price.target_s
    if base.n_prompt > 0.0:
        price = step_times.price(costs, alone, node_s, limits.lambda_over_plain, most)
    step_s = price.target_s[min(_count(real, nodes), most)] + limits.drafts_s
    if not anyone_late(batch, limits.tpots_s, step_s):
        return nodes, False, nothing, step_prices
    state = clocks(batch, np.arange(requests), limits.tpots_s)
    late = behind(state, step_s, 1.0 + _accepted_lengths(expected, request, ~nothing, requests))
    if not late.any():
        return nodes, False, nothing, step_prices
    # A device that ranks verifies forced tokens only if they are real.
    forced = forced_nodes(ranked, request, late, needed(state, step_s), step_s, price, budget)
    gained = 1.0 + _accepted_lengths(expected, request, forced, requests)
    forced_s = price.target_s[min(_count(real, forced), most)] + limits.drafts_s
    longest_s = longest_step_s(state, gained, forced_s) - limits.drafts_s
    return select(ranked, request, price, budget, forced, longest_s).nodes, True, forced, step_prices


@compiled
def _count(real: Floats, nodes: Bools) -> int:
    """Expected number of nodes that cost a token, rounded up."""
    return int(np.ceil((real * nodes).sum() - ROUNDING))


class Selection(NamedTuple):
    """A plan and its worth: expected tokens beyond the bonus tokens, less lambda times the step's seconds."""

    nodes: Bools
    """(M,)"""
    value: float


@compiled
def select(paths: Floats, request: Ints, price: Price, budget: int, forced: Bools, longest_s: float) -> Selection:
    """The best set of nodes for the target to score. The empty set is always a candidate, unless some nodes are forced.

    paths: (M,), probability that a node and all nodes above it are accepted. request: (M,). budget: most
    proposals that the step may hold. forced: (M,), subtrees that are scored whatever they are worth; they fit into the
    budget. longest_s: most seconds of the target's pass, unless the forced nodes alone take longer.
    """
    scores = np.empty(len(paths))
    for m in range(len(paths)):
        scores[m] = paths[m] - price.rate * price.node_s[request[m]]
    taken, gain, candidates = _candidates(scores, forced, price)
    longest_s = max(longest_s, price.target_s[taken])
    ranked = -np.sort(-candidates)[: max(0, min(budget, len(price.target_s) - 1) - taken)]
    count, value = _best_count(ranked, gain, taken, price, longest_s)
    nodes = forced.copy()
    if count:
        _take(scores, nodes, ranked[count - 1], count)
    return Selection(nodes, value)


@compiled
def _candidates(scores: Floats, forced: Bools, price: Price) -> tuple[int, float, Floats]:
    """Number of forced nodes, their gain, and the scores of the other nodes that may pay for the cheapest token."""
    seconds, rate, least_s = price.target_s, price.rate, np.inf
    for more in range(1, len(seconds)):
        least_s = min(least_s, seconds[more] - seconds[more - 1])
    taken, gain, kept, count = 0, 0.0, np.empty(len(scores)), 0
    for m in range(len(scores)):
        if forced[m]:
            taken += 1
            gain += scores[m]
        elif scores[m] > rate * max(0.0, least_s):
            kept[count] = scores[m]
            count += 1
    return taken, gain, kept[:count]


@compiled
def _best_count(ranked: Floats, gain: float, taken: int, price: Price, longest_s: float) -> tuple[int, float]:
    """How many of the ranked scores to add to the `taken` forced nodes, and the worth of all."""
    seconds, rate = price.target_s, price.rate
    best, value = 0, worth(gain, seconds[taken], rate)
    for count in range(1, len(ranked) + 1):
        gain += ranked[count - 1]
        value_so_far = worth(gain, seconds[taken + count], rate)
        if value_so_far > value and seconds[taken + count] <= longest_s:
            best, value = count, value_so_far
    return best, value


@compiled
def _take(scores: Floats, nodes: Bools, least: float, count: int) -> None:
    """Mark the `count` highest scores, the lowest of which is `least`. Equal scores go by position: parents first."""
    for m in range(len(scores)):
        if scores[m] > least and not nodes[m]:
            nodes[m] = True
            count -= 1
    for m in range(len(scores)):
        if count and scores[m] == least and not nodes[m]:
            nodes[m] = True
            count -= 1


class RealProposals(NamedTuple):
    """R, the number of real proposals among the nodes that pay."""

    mean: float
    variance: float
    least_path: float
    """Lowest path of a node that pays."""


@compiled
def _real_proposals(proposed: Nodes, nodes: Bools, paths: NodePaths, requests: int) -> RealProposals:
    """R among `nodes` (M,). Requests find proposals independently of each other:

    E[R] = sum(E[R_i]),    Var[R] = sum(E[R_i^2] - E[R_i]^2),    E[R_i^2] = sum((2 k - 1) P(R_i >= k))
    """
    means, squares, least = np.zeros(requests), np.zeros(requests), 1.0
    for m in np.flatnonzero(nodes):
        i = proposed.request[m]
        means[i] += paths.real[m]
        squares[i] += (2 * proposed.depth[m] - 1) * paths.real[m]
        least = min(least, paths.ranked[m])
    return RealProposals(means.sum(), np.maximum(0.0, squares - means**2).sum(), least)


@compiled
def _weights(counts: Counts, proposed: Nodes, ranked: Floats, requests: int) -> Floats:
    """(N,): `DeviceOrder.weights`: acceptance of a request's first token / that of all requests' first tokens."""
    weights = np.ones(requests)
    for m in np.flatnonzero(proposed.depth == 1):
        if ranked[m] > 0.0:
            weights[proposed.request[m]] = ranked[m] / counts.acceptance_rates[proposed.drafter[m], 0]
    return weights


@compiled
def _worth_verifying(real: RealProposals, step_prices: Floats, most: int) -> int:
    """Number of proposals to order, at least the expected number of real ones and at most `most`.

    One more than n pays while a real one is likely enough to be left over. With R as good as normal:

        P(R > n) * least path > price[n + 1] - price[n]
    """
    count = int(np.round(real.mean))
    if real.variance <= 0.0:
        return count
    spread = math.sqrt(2.0 * real.variance)
    for more in range(count + 1, min(most + 1, len(step_prices))):
        left_over = 0.5 * math.erfc((more - 0.5 - real.mean) / spread)
        if left_over * real.least_path <= step_prices[more] - step_prices[more - 1]:
            break
        count = more
    return count
