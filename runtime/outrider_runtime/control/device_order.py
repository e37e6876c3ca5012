"""The order to a device that chooses the proposals to verify: how many, and what the device cannot know itself.

With asynchronous scheduling, a step is scheduled before the device has drafted for it. The host then knows hit rates
and each request's acceptance; the device knows which proposals are real. N requests, M nodes, D drafters, K depths, R
ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider_runtime.control.acceptance.estimate import hit_rates, node_paths
from outrider_runtime.control.acceptance.trials import Counts, bin_of
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NO_DRAFTER, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.data.forest import Forest, Nodes
from outrider_runtime.control.data.plans import DeviceOrder


def device_order(
    batch: Batch, forest: Forest, counts: tuple[Any, ...], nodes: Bools, forced: Ints, room: int, *, all_pay: bool
) -> DeviceOrder:
    """The order for the next step.

    counts: fields of `Counts`. nodes: (M,), nodes that pay if they are real proposals. forced: (N,), see `DeviceOrder`.
    room: most proposals that the step may hold. all_pay: every real one of `nodes` is verified, whatever is expected.
    """
    requests = len(batch)
    lengths = np.bincount(forest.request[nodes], minlength=requests)
    usable = forest.depth < batch.left[forest.request]
    caps = np.bincount(forest.request[usable], minlength=requests)
    caps = caps if caps.sum() <= room else lengths
    if all_pay or not len(forest):
        return DeviceOrder(int(lengths.sum()), lengths, forced, np.ones(requests))
    unknown = np.zeros(requests, bool) if forest.placeholders is None else forest.placeholders
    order = np.ascontiguousarray(forest.drafter_order)
    real, weights = _expected(batch.columns, forest.columns, order, counts, nodes, unknown)
    tokens = max(int(forced.sum()), round(real))
    return DeviceOrder(min(tokens, int(caps.sum())), caps, forced, weights)


@compiled
def _expected(
    columns: tuple[Any, ...], forest: tuple[Any, ...], order: Ints, counts: tuple[Any, ...], nodes: Bools,
    unknown: Bools,
) -> tuple[float, Floats]:  # fmt: skip
    """Expected number of real proposals among `nodes` (M,), the sum of P(node is real), and `DeviceOrder.weights` (N,).

    columns, forest, counts: fields of `Columns`, `Nodes`, `Counts`. order: (R, N), `Forest.drafter_order`. unknown:
    (N,), requests with placeholders.
    """
    batch, proposed, known = Columns(*columns), Nodes(*forest), Counts(*counts)
    paths, hits = node_paths(known, batch, proposed), hit_rates(known)
    real, weights = 0.0, np.ones(len(batch.slot))
    for m in range(len(nodes)):
        d, i, k = proposed.drafter[m], proposed.request[m], min(proposed.depth[m], hits.shape[1]) - 1
        if nodes[m]:
            real += _is_real(order[:, i], hits, k) if unknown[i] else 1.0
        if proposed.depth[m] == 1 and paths[m] > 0.0:
            weights[i] = paths[m] / known.acceptance_rates[d, 0, bin_of(proposed.confidence[m], known.edges[d])]
    return real, weights


@compiled
def _is_real(order: Ints, hits: Floats, k: int) -> float:
    """P(a request has a proposal of depth k + 1) from drafters `order` (R,), tried in this order. hits: (D, K), h
    below.

    P = h1[k] + (1 - h1[0]) * (h2[k] + (1 - h2[0]) * ...)
    """
    real, nothing_yet = 0.0, 1.0
    for d in order:
        if d == NO_DRAFTER:
            break
        real += nothing_yet * hits[d, k]
        nothing_yet *= 1.0 - hits[d, 0]
    return real
