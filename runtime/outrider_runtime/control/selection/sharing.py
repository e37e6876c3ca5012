"""Which request uses which drafter, given the drafters that run and their passes: the one that suits it best.

Shapes: D drafters, V variants (see `candidates`), N requests, K positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.acceptance.trees import place_rates
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NO_DRAFTER, Bools, Floats, Ints
from outrider_runtime.control.selection.offers import Pool
from outrider_runtime.control.slo import MOST_FORCED

GAIN, TOKENS, NONE, NET, ASKING = range(5)
"""Rows of `Share.per_request`."""


class Share(NamedTuple):
    """What each request gets, for one set of passes. All arrays are overwritten for the next set."""

    columns: Floats
    """(3, V, K+1, N): for draft lengths 0..K of a variant, without positions that do not pay for their tokens: net
    worth at the price of a token, expected accepted tokens, expected proposals. The price of using the drafter
    (ASKING) is not subtracted yet."""
    read_s: Floats
    """(V,): seconds that a verified token adds to later first passes, as assumed in `columns`."""
    least_gain: Floats
    """(N,): see `slo.least_gains`."""
    order: Ints
    """(2, N): variants that each request uses: the first, and the one for when that finds nothing; NO_DRAFTER."""
    whole: Floats
    """(D, K, N): expected accepted tokens of whole chains of length 1..K; 0 where the drafter has none of that
    length."""
    per_request: Floats
    """(5, N): GAIN, expected accepted tokens; TOKENS, expected proposals; NONE, P(no proposal); NET, net worth in
    tokens; ASKING, lambda * the seconds that the request adds to its model's passes, in tokens."""


@compiled
def whole_chains(paths: Floats, offers: Floats) -> Floats:
    """`Share.whole`. paths: (D, K, N), offers: (D, K), see `Pool`."""
    gains = np.zeros(paths.shape)
    for d in range(paths.shape[0]):
        for i in range(paths.shape[2]):
            gain = 0.0
            for k in range(paths.shape[1]):
                gain += offers[d, k] * paths[d, k, i]
                gains[d, k, i] = gain if paths[d, k, i] > 0.0 else 0.0
    return gains


@compiled
def fill_chain(pool: Pool, d: int, token_s: float, least_gain: Floats, columns: Floats) -> None:
    """Set a chain's columns (3, K+1, N), see `Share`.

    token_s: seconds of the first verified token. The knee in the cost counts later, when the whole plan is weighed.
    """
    net, gain, tokens, paths, offers = columns[0], columns[1], columns[2], pool.paths[d], pool.offers[d]
    rate, node_s, behind = pool.price.rate, pool.price.node_s, pool.need.behind
    pays = np.ones(paths.shape[1], np.bool_)
    for k in range(paths.shape[0]):
        for i in range(paths.shape[1]):
            price = rate * (token_s + node_s[i])
            at_any_cost = k < MOST_FORCED and gain[k, i] < least_gain[i]
            cost = 1.0 if pool.scores_placeholders else offers[k]
            path = offers[k] * paths[k, i]
            pays[i] &= path > (0.0 if at_any_cost else price * cost)
            gain[k + 1, i] = gain[k, i] + (path if pays[i] else 0.0)
            tokens[k + 1, i] = tokens[k, i] + (cost if pays[i] else 0.0)
            net[k + 1, i] = gain[k + 1, i] - (0.0 if behind[i] else price * tokens[k + 1, i])


@compiled
def fill_tree(pool: Pool, d: int, width: int, token_s: float, least_gain: Floats, columns: Floats) -> None:
    """Like `fill_chain`, for trees of a fixed width; their drafter runs over the whole batch."""
    net, gain, tokens = columns[0], columns[1], columns[2]
    rates = place_rates(pool.paths[d], pool.beams.places[d], pool.beams.chain_rates[d])
    reach = np.ones(rates.shape[2])
    for k in range(rates.shape[0]):
        for i in range(len(reach)):
            price, before = pool.price.rate * (token_s + pool.price.node_s[i]), reach[i]
            reach[i], gained, taken = 0.0, gain[k, i], tokens[k, i]
            for place in range(width if before > 0.0 else 0):
                path = before * rates[k, place, i]
                if path > (0.0 if taken < MOST_FORCED and gained < least_gain[i] else price):
                    gained, taken, reach[i] = gained + path, taken + 1.0, reach[i] + path
            gain[k + 1, i], tokens[k + 1, i] = gained, taken
            net[k + 1, i] = gained - (0.0 if pool.need.behind[i] else price * taken)
    columns *= pool.offers[d, 0]


@compiled
def _asking(pool: Pool, d: int, i: int, passes: int) -> float:
    """Tokens that request `i` costs drafter `d`: lambda * the seconds that it adds to its passes; 0 for a late
    request, which uses it at any cost."""
    if pool.asking_s.size == 0 or pool.need.behind[i]:
        return 0.0
    return float(pool.price.rate * passes * pool.asking_s[d, i])


@compiled
def share_models(pool: Pool, share: Share, drafter: Ints, models: Bools, passes: Ints) -> None:
    """Give each request the model that is worth most to it. drafter, models, passes: (V,)"""
    order, request, columns = share.order, share.per_request, share.columns
    order[:], request[:], request[NONE] = NO_DRAFTER, 0.0, 1.0
    for v in range(len(passes)):
        if models[v] and passes[v] > 0:
            net, gain, tokens = columns[0, v, passes[v]], columns[1, v, passes[v]], columns[2, v, passes[v]]
            miss = 0.0 if pool.scores_placeholders else 1.0 - pool.offers[drafter[v], 0]
            for i in range(len(net)):
                asking = _asking(pool, drafter[v], i, passes[v])
                if net[i] - asking > request[NET, i]:
                    order[0, i], request[GAIN, i], request[TOKENS, i] = v, gain[i], tokens[i]
                    request[NONE, i], request[NET, i], request[ASKING, i] = miss, net[i] - asking, asking


@compiled
def share_lookups(share: Share, offers: Floats, drafter: Ints, models: Bools, passes: Ints) -> None:
    """Give each request the lookup that is worth most, before its model or in place of it. The model's passes are paid
    for whether the lookup finds something or not. offers: (D, K), see `Pool`; drafter, models, passes: (V,)"""
    if models.all():
        return
    order, request, columns = share.order, share.per_request, share.columns
    model, of_model = order[0].copy(), request.copy()
    for v in range(len(passes)):
        if models[v] or passes[v] == 0:
            continue
        net, gain, tokens = columns[0, v, passes[v]], columns[1, v, passes[v]], columns[2, v, passes[v]]
        miss = max(0.0, 1.0 - offers[drafter[v], 0])
        for i in range(len(net)):
            of_second = miss * (of_model[NET, i] + of_model[ASKING, i]) - of_model[ASKING, i]
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
    pool: Pool, lookup: int, model: int, passes: int, i: int, token_s: float, least_gain: float
) -> tuple[float, float, float]:
    """Expected accepted tokens of request `i`'s placeholders, the number of them that pay, and their net worth.

    The model's `passes` proposals stand in whenever the lookup finds nothing, so paths are those of
    `estimate.placeholder_paths`; a placeholder costs a whole token. token_s: seconds of the first placeholder.
    least_gain: see `slo.least_gains`.
    """
    gain, tokens, hit = 0.0, 0.0, pool.offers[lookup]
    price, miss = pool.price.rate * (token_s + pool.price.node_s[i]), max(0.0, 1.0 - pool.offers[lookup, 0])
    for k in range(pool.paths.shape[1]):
        path = hit[k] * pool.paths[lookup, k, i]
        path += miss * pool.offers[model, k] * pool.paths[model, k, i] if k < passes else 0.0
        if not path > (0.0 if k < MOST_FORCED and gain < least_gain else price):
            break
        gain, tokens = gain + path, tokens + 1.0
    return gain, tokens, gain - (0.0 if pool.need.behind[i] else price * tokens)


@compiled
def share_placeholders(pool: Pool, share: Share, drafter: Ints, models: Bools, passes: Ints) -> None:
    """Like `share_lookups`, for placeholders, which cost a whole token whether they hold a proposal or not. Lookup and
    model share them, so they may pay for both together and for neither alone. drafter, models, passes: (V,)"""
    order, request, model = share.order, share.per_request, share.order[0].copy()
    behind_lookup = np.flatnonzero(models & (passes > 0))
    for v in range(len(passes)):
        if models[v] or passes[v] == 0:
            continue
        alone, token_s = share.columns[:, v, passes[v]], pool.price.token_s + share.read_s[v]
        for i in range(order.shape[1]):
            second, gain, tokens, net = NO_DRAFTER, alone[1, i], alone[2, i], alone[0, i]
            for w in behind_lookup:
                if pool.paths[drafter[w], 0, i] == 0.0:
                    continue
                both = _placeholders(pool, drafter[v], drafter[w], passes[w], i, token_s, share.least_gain[i])
                net_of_both = both[2] - _asking(pool, drafter[w], i, passes[w])
                if net_of_both > net or (net_of_both == net and second == NO_DRAFTER):
                    second, gain, tokens, net = w, both[0], both[1], net_of_both
            ties = net == request[NET, i] and order[0, i] == model[i] and v < model[i]
            if tokens > 0.0 and (net > request[NET, i] or ties):
                order[0, i], order[1, i] = v, second
                request[GAIN, i], request[TOKENS, i], request[NONE, i], request[NET, i] = gain, tokens, 0.0, net


@compiled
def share_evenly(pool: Pool, share: Share, drafter: Ints, passes: Ints) -> bool:
    """Give each request, for a uniform step, the model that suits it best; all models propose equally many tokens and
    all of these are verified. drafter, passes: (V,). Returns False if some request has no model for that length."""
    length, order, request = passes.max(), share.order, share.per_request
    order[:], request[TOKENS], request[NONE], request[NET] = NO_DRAFTER, length, 0.0, -np.inf
    for v in np.flatnonzero(passes):
        gains = share.whole[drafter[v], length - 1]
        for i in range(len(gains)):
            net = gains[i] - _asking(pool, drafter[v], i, length)
            if gains[i] > 0.0 and net > request[NET, i]:
                order[0, i], request[GAIN, i], request[NET, i] = v, gains[i], net
    return bool(order[0].min() > NO_DRAFTER)


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
def longest(share: Share, models: Bools, passes: Ints, scores_placeholders: bool) -> Ints:
    """(V,): the longest proposal that some request uses, of each variant; for a lookup, the positions that pay for
    themselves."""
    lengths, tokens = np.zeros(len(passes), np.int64), share.columns[2]
    for i in range(share.order.shape[1]):
        for v in share.order[:, i]:
            if v != NO_DRAFTER and models[v]:
                lengths[v] = passes[v]
            elif v != NO_DRAFTER and scores_placeholders:
                lengths[v] = max(lengths[v], min(passes[v], int(share.per_request[TOKENS, i])))
            elif v != NO_DRAFTER:
                for k in range(lengths[v] + 1, passes[v] + 1):
                    if tokens[v, k, i] > tokens[v, k - 1, i]:
                        lengths[v] = k
    return lengths
