"""The joint choice of drafters: which run, at which draft lengths, how wide, and which requests use which.

The worth of a plan is the sum of what each request gains with the drafter that suits it best, less the drafters' fixed
costs once. A lookup is one call for any length. A request that it misses is served by a model, if one runs: the request
then has two drafters, in order of preference. Depth and width of trees are chosen by the same argmax, where AdaServe
(section 5.2) has a rule: a node of a beam counts if it pays for its token, as in a chain. k = 0 is always a candidate,
and wins a tie.

The search moves one drafter at a time. A drafter that proposes trees has one variant for each width of its trees, of
which at most one runs; a chain is a tree of width 1.

Shapes: D drafters, V variants, N decoding requests, K positions, C candidates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.acceptance import Counts
from outrider_runtime.control.batch import NO_DRAFTER, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.compiled import borrowed, compiled, keep_alive
from outrider_runtime.control.draft_options import EVERY_GAP, DraftOptions, StepLimits, offered, step_limits
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.settings import InForce, Settings
from outrider_runtime.control.slo import MOST_FORCED, UnderWay, least_gains, shortfall
from outrider_runtime.control.step_times import Costs
from outrider_runtime.control.trees import place_rates
from outrider_runtime.control.value import expected_s, worth

GAIN, TOKENS, NONE, NET, USE = range(5)
"""Rows of `Share.per_request`."""
EQUAL_SHORTFALL = 0.02
"""Tokens per late request: choices whose shortfalls differ by less than this are compared by worth alone."""
MOST_MOVES = 2
"""Most moves of the search / variants: one that takes longer is going in circles between equal plans."""
MOST_EXCESS, DINKELBACH_STEPS = 1.05, 2
"""Largest lambda / goodput of the best choice that is left as it is; steps by which a larger one is brought down."""


class Variants(NamedTuple):
    drafter: Ints
    """(V,)"""
    width: Ints
    """(V,)"""
    models: Bools
    """(V,): variants of models: they have a proposal for any context, and so serve requests that a lookup misses."""
    autoregressive: Bools
    """(V,): every token is a pass."""


def variants(autoregressive: Bools, stands_in: Bools, widest: Ints) -> Variants:
    """autoregressive, stands_in, widest: (D,), see `settings.Drafter`."""
    drafter = np.repeat(np.arange(len(widest)), widest)
    width = np.array([w + 1 for most in widest for w in range(most)], np.int64)
    return Variants(drafter, width, stands_in[drafter], autoregressive[drafter])


@compiled
def one_drafter_moves(incumbent: Ints, variants: Variants, longest: int) -> Ints:
    """(C, V): draft lengths. The first row is the incumbent (V,); every other one gives one variant another draft
    length, 0 included.

    A drafter proposes up to `longest` tokens; a lookup and a block drafter propose all that they have, at one price.

    Several models together may pay where none does alone, since verified tokens are paid for once, whichever model each
    request uses. So while nothing runs, "all models at one length" is a move, too.
    """
    rows, count = np.zeros((1 + (len(incumbent) + 1) * (longest + 1), len(incumbent)), np.int64), 1
    rows[0] = incumbent
    for v in range(len(incumbent)):
        for length in range(0, longest + 1, 1 if variants.autoregressive[v] else max(1, longest)):
            if length != incumbent[v]:
                for other in range(len(incumbent)):
                    rows[count, other] = 0 if variants.drafter[other] == variants.drafter[v] else incumbent[other]
                rows[count, v] = length
                count += 1
    together = variants.models & (variants.width == 1)
    for length in range(1, longest + 1 if together.sum() > 1 and not incumbent.any() else 1):
        rows[count] = np.where(together, length, 0)
        count += 1
    return rows[:count]


class Share(NamedTuple):
    """What each request gets, for one set of draft lengths. `order` and `per_request` are overwritten for each set,
    `columns` of a variant only when its `read_s` changes."""

    columns: Floats
    """(3, V, K+1, N): for draft lengths 0..K of a variant, without positions that do not pay for their tokens: net
    worth at the price of a token, expected accepted tokens, expected proposals. The price of using the drafter
    (USE) is not subtracted yet."""
    read_s: Floats
    """(V,): seconds that a verified token adds to later first passes, as assumed in `columns`."""
    least_gain: Floats
    """(N,): see `slo.least_gains`."""
    order: Ints
    """(2, N): variants that each request uses: the first, and the one for when that finds nothing; NO_DRAFTER."""
    per_request: Floats
    """(5, N): GAIN, expected accepted tokens; TOKENS, expected proposals; NONE, P(no proposal); NET, net worth in
    tokens; USE, lambda * the seconds that the request adds to its model's passes and catch-up, in tokens."""


@compiled
def fill_chain(options: DraftOptions, d: int, token_s: float, least_gain: Floats, columns: Floats) -> None:
    """Set a chain's columns (3, K+1, N), see `Share`.

    token_s: seconds of the first verified token. The knee in the cost counts later, when the whole plan is weighed.
    """
    net, gain, tokens, paths, hits = columns[0], columns[1], columns[2], options.paths[d], options.hit_rates[d]
    rate, node_s, behind = options.price.rate, options.price.node_s, options.need.behind
    pays = np.ones(paths.shape[1], np.bool_)
    for k in range(paths.shape[0]):
        for i in range(paths.shape[1]):
            price = rate * (token_s + node_s[i])
            at_any_cost = k < MOST_FORCED and gain[k, i] < least_gain[i]
            cost = 1.0 if options.scores_placeholders else hits[k]
            path = hits[k] * paths[k, i]
            pays[i] &= path > (0.0 if at_any_cost else price * cost)
            gain[k + 1, i] = gain[k, i] + (path if pays[i] else 0.0)
            tokens[k + 1, i] = tokens[k, i] + (cost if pays[i] else 0.0)
            net[k + 1, i] = gain[k + 1, i] - (0.0 if behind[i] else price * tokens[k + 1, i])


@compiled
def fill_tree(options: DraftOptions, d: int, width: int, token_s: float, least_gain: Floats, columns: Floats) -> None:
    """Like `fill_chain`, for trees of a fixed width; their drafter runs over the whole batch."""
    net, gain, tokens = columns[0], columns[1], columns[2]
    rates = place_rates(options.paths[d], options.beams.places[d], options.beams.chain_rates[d])
    reach = np.ones(rates.shape[2])
    for k in range(rates.shape[0]):
        for i in range(len(reach)):
            price, before = options.price.rate * (token_s + options.price.node_s[i]), reach[i]
            reach[i], accepted, taken = 0.0, gain[k, i], tokens[k, i]
            for place in range(width if before > 0.0 else 0):
                path = before * rates[k, place, i]
                if path > (0.0 if taken < MOST_FORCED and accepted < least_gain[i] else price):
                    accepted, taken, reach[i] = accepted + path, taken + 1.0, reach[i] + path
            gain[k + 1, i], tokens[k + 1, i] = accepted, taken
            net[k + 1, i] = accepted - (0.0 if options.need.behind[i] else price * taken)
    columns *= options.hit_rates[d, 0]


@compiled
def _use_tokens(options: DraftOptions, d: int, i: int, draft_length: int) -> float:
    """Tokens that using drafter `d` costs for request `i`: lambda * the seconds that the request adds; for a late
    request, which uses it at any cost, only those of its KV gap."""
    seconds = draft_length * options.use_s[d, i] if options.use_s.size and not options.need.behind[i] else 0.0
    return float(options.price.rate * (seconds + (options.catch_up_s[d, i] if options.catch_up_s.size else 0.0)))


@compiled
def share_models(options: DraftOptions, variants: Variants, draft_lengths: Ints, share: Share) -> None:
    """Give each request the model that is worth most to it. draft_lengths: (V,)"""
    drafter, models, order = variants.drafter, variants.models, share.order
    request, columns = share.per_request, share.columns
    order[:], request[:], request[NONE] = NO_DRAFTER, 0.0, 1.0
    for v in range(len(draft_lengths)):
        if models[v] and draft_lengths[v] > 0:
            k = draft_lengths[v]
            net, gain, tokens = columns[0, v, k], columns[1, v, k], columns[2, v, k]
            miss = 0.0 if options.scores_placeholders else 1.0 - options.hit_rates[drafter[v], 0]
            for i in range(len(net)):
                use = _use_tokens(options, drafter[v], i, draft_lengths[v])
                if net[i] - use > request[NET, i]:
                    order[0, i], request[GAIN, i], request[TOKENS, i] = v, gain[i], tokens[i]
                    request[NONE, i], request[NET, i], request[USE, i] = miss, net[i] - use, use


@compiled
def share_lookups(options: DraftOptions, variants: Variants, draft_lengths: Ints, share: Share) -> None:
    """Give each request the lookup that is worth most, before its model or in place of it. The model's passes are paid
    for whether the lookup finds something or not. draft_lengths: (V,)"""
    if variants.models.all():
        return
    order, request, columns = share.order, share.per_request, share.columns
    model, of_model = order[0].copy(), request.copy()
    for v in range(len(draft_lengths)):
        if variants.models[v] or draft_lengths[v] == 0:
            continue
        k = draft_lengths[v]
        net, gain, tokens = columns[0, v, k], columns[1, v, k], columns[2, v, k]
        miss = max(0.0, 1.0 - options.hit_rates[variants.drafter[v], 0])
        for i in range(len(net)):
            of_second = miss * (of_model[NET, i] + of_model[USE, i]) - of_model[USE, i]
            keeps = of_second >= 0.0
            net_of_both = net[i] + max(0.0, of_second)
            ties = net_of_both == request[NET, i] and order[0, i] == model[i] and v < model[i]
            if tokens[i] > 0.0 and (net_of_both > request[NET, i] or ties):
                reach = miss if keeps else 0.0
                order[0, i], order[1, i], request[NET, i] = v, model[i] if keeps else NO_DRAFTER, net_of_both
                request[GAIN, i] = gain[i] + reach * of_model[GAIN, i]
                request[TOKENS, i] = tokens[i] + reach * of_model[TOKENS, i]
                request[NONE, i] = miss * of_model[NONE, i] if keeps else miss


@compiled
def _placeholders(
    options: DraftOptions, lookup: int, model: int, draft_length: int, i: int, token_s: float, least_gain: float
) -> tuple[float, float, float]:
    """Expected accepted tokens of request `i`'s placeholders, the number of them that pay, and their net worth.

    The model's `draft_length` proposals stand in whenever the lookup finds nothing, so paths are those of
    `verify.paths_to_score`; a placeholder costs a whole token. token_s: seconds of the first placeholder.
    least_gain: see `slo.least_gains`.
    """
    gain, tokens, hit = 0.0, 0.0, options.hit_rates[lookup]
    price, miss = options.price.rate * (token_s + options.price.node_s[i]), max(0.0, 1.0 - options.hit_rates[lookup, 0])
    for k in range(options.paths.shape[1]):
        path = hit[k] * options.paths[lookup, k, i]
        path += miss * options.hit_rates[model, k] * options.paths[model, k, i] if k < draft_length else 0.0
        if not path > (0.0 if k < MOST_FORCED and gain < least_gain else price):
            break
        gain, tokens = gain + path, tokens + 1.0
    return gain, tokens, gain - (0.0 if options.need.behind[i] else price * tokens)


@compiled
def share_placeholders(options: DraftOptions, variants: Variants, draft_lengths: Ints, share: Share) -> None:
    """Like `share_lookups`, for placeholders, which cost a whole token whether they hold a proposal or not. Lookup and
    model share them, so they may pay for both together and for neither alone. draft_lengths: (V,)"""
    drafter, models = variants.drafter, variants.models
    order, request = share.order, share.per_request
    for v in range(len(draft_lengths)):
        if models[v] or draft_lengths[v] == 0:
            continue
        alone, token_s = share.columns[:, v, draft_lengths[v]], options.price.token_s + share.read_s[v]
        for i in range(order.shape[1]):
            second, gain, tokens, net = NO_DRAFTER, alone[1, i], alone[2, i], alone[0, i]
            for w in range(len(models)):
                if not models[w] or draft_lengths[w] == 0 or options.paths[drafter[w], 0, i] == 0.0:
                    continue
                both = _placeholders(options, drafter[v], drafter[w], draft_lengths[w], i, token_s, share.least_gain[i])
                net_of_both = both[2] - _use_tokens(options, drafter[w], i, draft_lengths[w])
                if net_of_both > net or (net_of_both == net and second == NO_DRAFTER):
                    second, gain, tokens, net = w, both[0], both[1], net_of_both
            first = order[0, i]
            ties = net == request[NET, i] and first != NO_DRAFTER and models[first] and v < first
            if tokens > 0.0 and (net > request[NET, i] or ties):
                order[0, i], order[1, i] = v, second
                request[GAIN, i], request[TOKENS, i], request[NONE, i], request[NET, i] = gain, tokens, 0.0, net


@compiled
def proposals(share: Share, node_s: Floats, next_s: float) -> tuple[float, float, float]:
    """Expected number of proposals, P(there is none), and the seconds that they cost beyond the target's price."""
    tokens, none, nodes_s = 0.0, 1.0, 0.0
    for i in range(len(node_s)):
        tokens += share.per_request[TOKENS, i]
        none *= share.per_request[NONE, i]
        nodes_s += share.per_request[TOKENS, i] * (node_s[i] + next_s)
    return tokens, none, nodes_s


@compiled
def longest(share: Share, models: Bools, draft_lengths: Ints, scores_placeholders: bool) -> Ints:
    """(V,): the longest proposal that some request uses, of each variant; for a lookup, the positions that pay for
    themselves."""
    lengths, tokens = np.zeros(len(draft_lengths), np.int64), share.columns[2]
    for i in range(share.order.shape[1]):
        for v in share.order[:, i]:
            if v != NO_DRAFTER and models[v]:
                lengths[v] = draft_lengths[v]
            elif v != NO_DRAFTER and scores_placeholders:
                lengths[v] = max(lengths[v], min(draft_lengths[v], int(share.per_request[TOKENS, i])))
            elif v != NO_DRAFTER:
                for k in range(lengths[v] + 1, draft_lengths[v] + 1):
                    if tokens[v, k, i] > tokens[v, k - 1, i]:
                        lengths[v] = k
    return lengths


class Choice(NamedTuple):
    draft_lengths: Ints
    """(D,): draft length of each drafter, or the depth of its trees; 0: it does not propose."""
    widths: Ints
    """(D,): width of its trees; 1: a chain."""
    drafter_order: Ints
    """(2, N): drafters of each request, in order of preference; NO_DRAFTER."""
    value: float
    """`E[tokens] - lambda * T_step`, bonus tokens left out."""
    plain_value: float
    """`value` of k = 0."""
    for_slo: bool = False
    """Some request is late: goodput alone might have chosen otherwise."""
    runs: bool = False
    """Some drafter proposes."""
    drafts_s: float = 0.0
    """Seconds of the drafts, without those of feeding KV gaps."""
    extra_cost_tokens: float = 0.0
    """`lambda * (T_step - T_plain)`."""
    lambda_over_plain: float = 1.0
    """Lambda of this choice / modelled goodput of plain decoding."""

    @property
    def gain(self) -> float:
        """Tokens that speculation gains in this step beyond its cost; 0 when k = 0 is the choice."""
        return self.value - self.plain_value


def plain_choice(drafters: int, requests: int) -> Choice:
    """The choice of k = 0."""
    none = np.zeros(drafters, np.int64)
    return Choice(none, none + 1, np.full((2, requests), NO_DRAFTER), 0.0, 0.0)


@compiled
def best_choice(options: DraftOptions, variants: Variants, lambda_over_plain: float) -> Choice:
    """The best set of drafters, draft lengths, widths and requests; k = 0 unless another plan is worth more or
    brings late requests closer to their TPOT.

    lambda_over_plain: see `Choice`.
    """
    price, for_slo = options.price, bool(options.need.behind.any())
    drafters, positions, requests = options.paths.shape
    lengths, widths = np.zeros(drafters, np.int64), np.ones(drafters, np.int64)
    order = np.full((2, requests), NO_DRAFTER)
    plain = float(-price.rate * price.target_s[0])
    nothing = Choice(lengths, widths, order, plain, plain, for_slo, False, 0.0, 0.0, lambda_over_plain)
    if options.paths.size == 0 or not options.longest:
        return nothing
    count = len(variants.drafter)
    scratch = Share(
        np.zeros((3, count, positions + 1, requests)), np.full(count, np.nan),
        least_gains(options.need, price.target_s[0]), np.empty((2, requests), np.int64), np.empty((5, requests)),
    )  # fmt: skip
    share = borrowed(scratch)
    best = _search(options, variants, share)
    used = longest(share, variants.models, best.draft_lengths, options.scores_placeholders)
    if not used.max() or (not for_slo and best.value <= plain):
        return nothing
    for v in np.flatnonzero(used):
        lengths[variants.drafter[v]], widths[variants.drafter[v]] = used[v], variants.width[v]
    for rank in range(2):
        for i in np.flatnonzero(share.order[rank] != NO_DRAFTER):
            order[rank, i] = variants.drafter[share.order[rank, i]]
    drafts_s = _drafts_s(options, variants, used, share.order)
    extra_cost_tokens = price.rate * (best.step_s - price.target_s[0])
    keep_alive(scratch)
    return Choice(
        lengths, widths, order, best.value, plain, for_slo, True, drafts_s, extra_cost_tokens, lambda_over_plain
    )


class _Best(NamedTuple):
    draft_lengths: Ints
    value: float
    step_s: float


@compiled
def _search(options: DraftOptions, variants: Variants, share: Share) -> _Best:
    """Greedy search: from k = 0 it takes the best move, which gives one drafter another length, until no move helps.

    This is exact for one drafter if every verified token costs the same. Several drafters' gains overlap while their
    costs add up, so each further drafter adds less: a plan that no single move improves is seldom far from the best.
    share: scratch space, left as the result sets it.
    """
    best = _Best(np.zeros(len(variants.drafter), np.int64), -np.inf, 0.0)
    for _ in range(MOST_MOVES * len(variants.drafter)):
        moves = one_drafter_moves(best.draft_lengths, variants, options.longest)
        before, best = best, _best(options, variants, moves, share)
        if (before.draft_lengths == best.draft_lengths).all():
            break
    return _best(options, variants, best.draft_lengths.reshape(1, -1), share)


@compiled
def _best(options: DraftOptions, variants: Variants, rows: Ints, share: Share) -> _Best:
    """The move of the highest worth among those whose shortfall for late requests is about the smallest; the first of
    equal ones. rows: (C, V), draft lengths. share: scratch space, left as the last move sets it."""
    price, need, late = options.price, options.need, options.need.behind.any()
    values, short, seconds = np.full(len(rows), -np.inf), np.full(len(rows), np.inf), np.zeros(len(rows))
    most = min(options.budget, len(price.target_s) - 1)
    for c in range(len(rows)):
        next_s = _share(options, variants, rows[c], share)
        tokens, none, nodes_s = proposals(share, price.node_s, next_s)
        if tokens > most:
            continue
        step_s = _drafts_s(options, variants, rows[c], share.order) + expected_s(price.target_s, tokens, none)
        step_s += _gaps_s(options, variants, rows[c], share.order)
        seconds[c] = step_s + nodes_s
        values[c] = worth(share.per_request[GAIN].sum(), seconds[c], price.rate)
        short[c] = shortfall(share.per_request[GAIN], need, step_s) if late else 0.0
    values[short > short.min() + EQUAL_SHORTFALL * need.behind.sum()] = -np.inf
    best = values.argmax()
    return _Best(rows[best], values[best], seconds[best])


@compiled
def _share(options: DraftOptions, variants: Variants, draft_lengths: Ints, share: Share) -> float:
    """Set `share` to what each request gets at these draft lengths (V,). Returns the seconds that a verified token
    takes in the drafters' next first passes."""
    next_s, drafter = 0.0, variants.drafter
    for v in range(len(draft_lengths)):
        next_s += options.token_s[drafter[v]] if draft_lengths[v] > 0 else 0.0
    for v in range(len(draft_lengths)):
        if draft_lengths[v] > 0 and share.read_s[v] != next_s:
            share.read_s[v] = next_s
            _fill(options, variants, v, options.price.token_s + next_s, share)
    share_models(options, variants, draft_lengths, share)
    if options.scores_placeholders:
        share_placeholders(options, variants, draft_lengths, share)
    else:
        share_lookups(options, variants, draft_lengths, share)
    return next_s


@compiled
def _fill(options: DraftOptions, variants: Variants, v: int, token_s: float, share: Share) -> None:
    """Set `Share.columns` of a variant."""
    if variants.width[v] == 1:
        fill_chain(options, variants.drafter[v], token_s, share.least_gain, share.columns[:, v])
    else:
        fill_tree(options, variants.drafter[v], variants.width[v], token_s, share.least_gain, share.columns[:, v])


@compiled
def _drafts_s(options: DraftOptions, variants: Variants, draft_lengths: Ints, order: Ints) -> float:
    """Seconds of the drafts: all passes, and what each request adds to those of the variants that it uses, apart from
    KV gaps. order: (2, N), see `Share.order`."""
    seconds = 0.0
    for v in range(len(draft_lengths)):
        if draft_lengths[v] > 0:
            d = variants.drafter[v]
            seconds += options.first_s[d] + (draft_lengths[v] - 1) * options.pass_s[d, variants.width[v] - 1]
    for i in range(order.shape[1] if options.use_s.size else 0):
        for v in order[:, i]:
            seconds += draft_lengths[v] * options.use_s[variants.drafter[v], i] if v != NO_DRAFTER else 0.0
    return seconds


@compiled
def _gaps_s(options: DraftOptions, variants: Variants, draft_lengths: Ints, order: Ints) -> float:
    """Price of the KV gaps of all requests, in seconds, see `DraftOptions.catch_up_s`."""
    seconds = 0.0
    for i in range(order.shape[1] if options.catch_up_s.size else 0):
        for v in order[:, i]:
            seconds += options.catch_up_s[variants.drafter[v], i] if v != NO_DRAFTER and draft_lengths[v] > 0 else 0.0
    return seconds


class DrafterSearch:
    def __init__(self, settings: Settings, evidence: Evidence, force: InForce, under_way: UnderWay) -> None:
        self.force, self._evidence, self._under_way = force, evidence, under_way
        drafters = settings.drafters
        autoregressive = np.array([drafter.passes for drafter in drafters], dtype=bool)
        stands_in = np.array([drafter.stands_in for drafter in drafters], dtype=bool)
        widest = np.array([drafter.widest for drafter in drafters], np.int64)
        self._variants = tuple(variants(autoregressive, stands_in, widest))

    @property
    def longest(self) -> int:
        """Largest draft length at present. Without a profile, one more than was ever tried: a larger one would be
        extrapolation."""
        evidence, most = self._evidence, self.force.most_tokens
        return min(most, evidence.longest + 1) if evidence.latency.learning else most

    def best(self, batch: Batch, closed: Ints = EVERY_GAP, lambda_over_plain: float | None = None) -> Choice:
        """The best choice at lambda = `lambda_over_plain` * modelled goodput of plain decoding.

        closed: see `draft_options.offered`. lambda_over_plain: None: as measured in earlier steps. If no choice reaches
        that goodput with this batch, lambda is brought down to what the best choice reaches (Dinkelbach's steps): too
        high a lambda favours short steps, and in the end k = 0.
        """
        if lambda_over_plain is not None:
            return self._at(lambda_over_plain, batch, closed)
        choice = self._at(self._evidence.goodput.ratio, batch, closed)
        requests = float(np.count_nonzero(batch.prompt_left == 0))
        is_reached = choice.gain >= requests * (choice.lambda_over_plain / MOST_EXCESS - 1.0)
        for _ in range(0 if is_reached or choice.for_slo else DINKELBACH_STEPS):
            best = (requests + choice.gain + choice.extra_cost_tokens) / (
                requests + choice.extra_cost_tokens / choice.lambda_over_plain
            )
            before, choice = choice, self._at(best, batch, closed)
            if (before.draft_lengths == choice.draft_lengths).all():
                break
        return choice

    def _at(self, lambda_over_plain: float, batch: Batch, closed: Ints) -> Choice:
        known = self._known(batch, self.longest, lambda_over_plain)
        return _best_choice(batch.columns, *known, closed, self._variants)

    def options(self, batch: Batch, lambda_over_plain: float | None = None) -> tuple[Ints, DraftOptions]:
        """The rows that may be drafted for, and their `DraftOptions`. lambda_over_plain: None: as measured."""
        lambda_over_plain = self._evidence.goodput.ratio if lambda_over_plain is None else lambda_over_plain
        counts, costs, limits = self._known(batch, max(1, self.longest), lambda_over_plain)
        known = Counts(*counts), Costs(*costs), StepLimits(*limits)
        return offered(Columns(*batch.columns), *known, EVERY_GAP)

    def _known(
        self, batch: Batch, longest: int, lambda_over_plain: float
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Everything that a choice depends on, apart from the batch: fields of `Counts`, `Costs`, `StepLimits`."""
        evidence, force = self._evidence, self.force
        limits = step_limits(batch, force, lambda_over_plain, self._under_way, longest)
        return evidence.acceptance.columns, evidence.latency.columns, limits


@compiled
def _best_choice(
    columns: tuple[Any, ...], counts: tuple[Any, ...], costs: tuple[Any, ...], limit_fields: tuple[Any, ...],
    closed: Ints, variants: tuple[Any, ...],
) -> Choice:  # fmt: skip
    """See `DrafterSearch.best`. Arguments: fields of `Columns`, `Counts`, `Costs`, `StepLimits`, `Variants`. closed:
    see `draft_options.offered`."""
    limits = borrowed(StepLimits(*limit_fields))
    owned = offered(borrowed(Columns(*columns)), borrowed(Counts(*counts)), borrowed(Costs(*costs)), limits, closed)
    choice = best_choice(borrowed(owned[1]), borrowed(Variants(*variants)), limits.lambda_over_plain)
    keep_alive(owned)
    return choice
