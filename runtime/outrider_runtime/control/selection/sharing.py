"""Who asks whom, given the drafters that run and their passes: each request whoever suits it best.

Shapes: D drafters, V variants (see `candidates`), N requests, K positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outrider_runtime.control.acceptance.trees import place_rates
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NOBODY, Bools, Floats, Ints
from outrider_runtime.control.selection.offers import Pool
from outrider_runtime.control.slo import MOST_FORCED

GAIN, TOKENS, NONE, NET, ASKING = range(5)


class Share(NamedTuple):
    """What comes of one set of passes. All is set in place."""

    columns: Floats
    """(3, V, K+1, N): of a variant's first 0..K positions, those left out that do not pay for their tokens: what they
    are worth at the price of a token, the tokens and the proposals that are expected of them. Asking is not paid for
    yet."""
    read_s: Floats
    """(V,): seconds that a verified token takes in later first passes, for which `columns` hold."""
    wanted: Floats
    """(N,): see `slo.wanted`."""
    who: Ints
    """(2, N): the variants that each request asks first and, where that finds nothing, next; NOBODY."""
    whole: Floats
    """(D, K, N): the tokens that whole chains of 1..K are worth; 0 where the drafter has none so long."""
    each: Floats
    """(5, N), of each request: GAIN, tokens that it may expect; TOKENS, proposals that it may expect; NONE, how likely
    it has none; NET, what all of that is worth; ASKING, tokens that lambda wants for asking its model."""


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
def fill_chain(pool: Pool, d: int, token_s: float, wanted: Floats, columns: Floats) -> None:
    """columns: (3, K+1, N) of a variant, and wanted: see `Share`. token_s: what a verified token costs at first. What
    the plan is worth under a cost that bends is weighed with its passes."""
    net, gain, tokens, paths, offers = columns[0], columns[1], columns[2], pool.paths[d], pool.offers[d]
    rate, node_s, behind = pool.price.rate, pool.price.node_s, pool.need.behind
    pays = np.ones(paths.shape[1], np.bool_)
    for k in range(paths.shape[0]):
        for i in range(paths.shape[1]):
            price = rate * (token_s + node_s[i])
            at_any_cost = k < MOST_FORCED and gain[k, i] < wanted[i]
            cost = 1.0 if pool.scores_placeholders else offers[k]
            path = offers[k] * paths[k, i]
            pays[i] &= path > (0.0 if at_any_cost else price * cost)
            gain[k + 1, i] = gain[k, i] + (path if pays[i] else 0.0)
            tokens[k + 1, i] = tokens[k, i] + (cost if pays[i] else 0.0)
            net[k + 1, i] = gain[k + 1, i] - (0.0 if behind[i] else price * tokens[k + 1, i])


@compiled
def fill_tree(pool: Pool, d: int, width: int, token_s: float, wanted: Floats, columns: Floats) -> None:
    """The same of trees of a width, by a drafter that runs over the whole batch."""
    net, gain, tokens = columns[0], columns[1], columns[2]
    rates = place_rates(pool.paths[d], pool.beams.places[d], pool.beams.hazards[d])
    reach = np.ones(rates.shape[2])
    for k in range(rates.shape[0]):
        for i in range(len(reach)):
            price, before = pool.price.rate * (token_s + pool.price.node_s[i]), reach[i]
            reach[i], gained, taken = 0.0, gain[k, i], tokens[k, i]
            for place in range(width if before > 0.0 else 0):
                path = before * rates[k, place, i]
                if path > (0.0 if taken < MOST_FORCED and gained < wanted[i] else price):
                    gained, taken, reach[i] = gained + path, taken + 1.0, reach[i] + path
            gain[k + 1, i], tokens[k + 1, i] = gained, taken
            net[k + 1, i] = gained - (0.0 if pool.need.behind[i] else price * taken)
    columns *= pool.offers[d, 0]


@compiled
def _asking(pool: Pool, d: int, i: int, passes: int) -> float:
    """Tokens that lambda wants for the time by which a request lengthens the passes of whom it asks. One that is behind
    asks at any cost."""
    if pool.asking_s.size == 0 or pool.need.behind[i]:
        return 0.0
    return float(pool.price.rate * passes * pool.asking_s[d, i])


@compiled
def share_models(pool: Pool, share: Share, drafter: Ints, models: Bools, passes: Ints) -> None:
    """Each request asks the model that is worth most to it. drafter, models, passes: (V,)"""
    who, each, columns = share.who, share.each, share.columns
    who[:], each[:], each[NONE] = NOBODY, 0.0, 1.0
    for v in range(len(passes)):
        if models[v] and passes[v] > 0:
            net, gain, tokens = columns[0, v, passes[v]], columns[1, v, passes[v]], columns[2, v, passes[v]]
            miss = 0.0 if pool.scores_placeholders else 1.0 - pool.offers[drafter[v], 0]
            for i in range(len(net)):
                asking = _asking(pool, drafter[v], i, passes[v])
                if net[i] - asking > each[NET, i]:
                    who[0, i], each[GAIN, i], each[TOKENS, i] = v, gain[i], tokens[i]
                    each[NONE, i], each[NET, i], each[ASKING, i] = miss, net[i] - asking, asking


@compiled
def share_lookups(share: Share, offers: Floats, drafter: Ints, models: Bools, passes: Ints) -> None:
    """Before its model, or in place of it, a request asks the lookup that is worth most. A model is asked whether the
    lookup finds something or not. offers: (D, K), see `Pool`; drafter, models, passes: (V,)"""
    if models.all():
        return
    who, each, columns = share.who, share.each, share.columns
    model, of_model = who[0].copy(), each.copy()
    for v in range(len(passes)):
        if models[v] or passes[v] == 0:
            continue
        net, gain, tokens = columns[0, v, passes[v]], columns[1, v, passes[v]], columns[2, v, passes[v]]
        miss = max(0.0, 1.0 - offers[drafter[v], 0])
        for i in range(len(net)):
            beside = miss * (of_model[NET, i] + of_model[ASKING, i]) - of_model[ASKING, i]
            keeps = beside >= 0.0
            here = net[i] + max(0.0, beside)
            ties = here == each[NET, i] and who[0, i] == model[i] and v < model[i]
            if tokens[i] > 0.0 and (here > each[NET, i] or ties):
                reach = miss if keeps else 0.0
                who[0, i], who[1, i], each[NET, i] = v, model[i] if keeps else NOBODY, here
                each[GAIN, i] = gain[i] + reach * of_model[GAIN, i]
                each[TOKENS, i] = tokens[i] + reach * of_model[TOKENS, i]
                each[NONE, i] = miss * of_model[NONE, i] if keeps else miss


@compiled
def _placeholders(
    pool: Pool, lookup: int, model: int, passes: int, i: int, token_s: float, least_gain: float
) -> tuple[float, float, float]:
    """Tokens that request `i` may expect of its placeholders, how many of them pay, and what they are worth, where the
    model's `passes` proposals stand in whenever the lookup finds nothing: the paths of `estimate.placeholder_paths`,
    a whole token each. token_s: seconds that a placeholder costs at first. least_gain: see `slo.wanted`."""
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
    """Do as `share_lookups` where a place costs a whole token whether it holds a proposal or not: lookup and model
    share the places, which may pay for both where they do not pay for either. drafter, models, passes: (V,)"""
    order, request, model = share.who, share.each, share.who[0].copy()
    behind_lookup = np.flatnonzero(models & (passes > 0))
    for v in range(len(passes)):
        if models[v] or passes[v] == 0:
            continue
        alone, token_s = share.columns[:, v, passes[v]], pool.price.token_s + share.read_s[v]
        for i in range(order.shape[1]):
            second, gain, tokens, net = NOBODY, alone[1, i], alone[2, i], alone[0, i]
            for w in behind_lookup:
                if pool.paths[drafter[w], 0, i] == 0.0:
                    continue
                both = _placeholders(pool, drafter[v], drafter[w], passes[w], i, token_s, share.wanted[i])
                net_of_both = both[2] - _asking(pool, drafter[w], i, passes[w])
                if net_of_both > net or (net_of_both == net and second == NOBODY):
                    second, gain, tokens, net = w, both[0], both[1], net_of_both
            ties = net == request[NET, i] and order[0, i] == model[i] and v < model[i]
            if tokens > 0.0 and (net > request[NET, i] or ties):
                order[0, i], order[1, i] = v, second
                request[GAIN, i], request[TOKENS, i], request[NONE, i], request[NET, i] = gain, tokens, 0.0, net


@compiled
def share_evenly(pool: Pool, share: Share, drafter: Ints, passes: Ints) -> bool:
    """Every request verifies all that the model which suits it best proposes; all that run propose as many. drafter,
    passes: (V,). False where nobody can serve one of them so far."""
    length, who, each = passes.max(), share.who, share.each
    who[:], each[TOKENS], each[NONE], each[NET] = NOBODY, length, 0.0, -np.inf
    for v in np.flatnonzero(passes):
        gains = share.whole[drafter[v], length - 1]
        for i in range(len(gains)):
            net = gains[i] - _asking(pool, drafter[v], i, length)
            if gains[i] > 0.0 and net > each[NET, i]:
                who[0, i], each[GAIN, i], each[NET, i] = v, gains[i], net
    return bool(who[0].min() > NOBODY)


@compiled
def proposals(share: Share, node_s: Floats, next_s: float) -> tuple[float, float, float]:
    """How many are expected, how likely there is none, and what they cost beyond their number."""
    tokens, none, nodes_s = 0.0, 1.0, 0.0
    for i in range(len(node_s)):
        tokens += share.each[TOKENS, i]
        none *= share.each[NONE, i]
        nodes_s += share.each[TOKENS, i] * (node_s[i] + next_s)
    return tokens, none, nodes_s


@compiled
def longest(share: Share, models: Bools, passes: Ints, scores_placeholders: bool) -> Ints:
    """(V,): the longest proposal that anybody asks each variant for; of a lookup, the positions that pay for
    themselves."""
    lengths, tokens = np.zeros(len(passes), np.int64), share.columns[2]
    for i in range(share.who.shape[1]):
        for v in share.who[:, i]:
            if v != NOBODY and models[v]:
                lengths[v] = passes[v]
            elif v != NOBODY and scores_placeholders:
                lengths[v] = max(lengths[v], min(passes[v], int(share.each[TOKENS, i])))
            elif v != NOBODY:
                for k in range(lengths[v] + 1, passes[v] + 1):
                    if tokens[v, k, i] > tokens[v, k - 1, i]:
                        lengths[v] = k
    return lengths
