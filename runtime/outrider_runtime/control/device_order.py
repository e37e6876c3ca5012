"""The order to a device that chooses the proposals which the target verifies: how many, and what it cannot know itself.

In asynchronous scheduling a step is scheduled before the device has drafted for it. The host then knows how often
drafters find anything, and what each request is like; the device knows which proposals are real. N requests, M nodes,
D drafters, K depths, R ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider_runtime.control.acceptance.estimate import hit_rates, node_paths
from outrider_runtime.control.acceptance.trials import Counts, bin_of
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NOBODY, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.data.forest import Forest, Nodes
from outrider_runtime.control.data.plans import DeviceOrder


def device_order(
    batch: Batch, forest: Forest, counts: tuple[Any, ...], nodes: Bools, forced: Ints, room: int, *, all_pay: bool
) -> DeviceOrder:
    """counts: as `Counts`. nodes: (M,), those that pay if they are real. forced: (N,). room: most proposals that the
    step may hold. all_pay: every one of `nodes` is verified, as far as it is real, whatever is expected."""
    requests = len(batch)
    lengths = np.bincount(forest.request[nodes], minlength=requests)
    usable = forest.depth < batch.left[forest.request]
    caps = np.bincount(forest.request[usable], minlength=requests)
    caps = caps if caps.sum() <= room else lengths
    if all_pay or not len(forest):
        return DeviceOrder(int(lengths.sum()), lengths, forced, np.ones(requests))
    unknown = np.zeros(requests, bool) if forest.placeholders is None else forest.placeholders
    order = np.ascontiguousarray(forest.asked)
    real, weights = _expected(batch.columns, forest.columns, order, counts, nodes, unknown)
    tokens = max(int(forced.sum()), round(real))
    return DeviceOrder(min(tokens, int(caps.sum())), caps, forced, weights)


@compiled
def _expected(
    columns: tuple[Any, ...], forest: tuple[Any, ...], order: Ints, counts: tuple[Any, ...], nodes: Bools,
    unknown: Bools,
) -> tuple[float, Floats]:  # fmt: skip
    """How many of `nodes` (M,) are real, sum of P(node is real); and the weights (N,) of `DeviceOrder`.

    columns, forest, counts: as `Columns`, `Nodes`, `Counts`. order: (R, N), `Forest.asked`. unknown: (N,), requests
    of placeholders.
    """
    batch, proposed, known = Columns(*columns), Nodes(*forest), Counts(*counts)
    paths, hits = node_paths(known, batch, proposed), hit_rates(known)
    real, weights = 0.0, np.ones(len(batch.slot))
    for m in range(len(nodes)):
        d, i, k = proposed.drafter[m], proposed.request[m], min(proposed.depth[m], hits.shape[1]) - 1
        if nodes[m]:
            real += _is_real(order[:, i], hits, k) if unknown[i] else 1.0
        if proposed.depth[m] == 1 and paths[m] > 0.0:
            weights[i] = paths[m] / known.hazards[d, 0, bin_of(proposed.confidence[m], known.edges[d])]
    return real, weights


@compiled
def _is_real(order: Ints, hits: Floats, k: int) -> float:
    """P(a request has a proposal of depth k + 1) from drafters `order` (R,), tried in turn. hits: (D, K).

    P = h1[k] + (1 - h1[0]) * (h2[k] + (1 - h2[0]) * ...)
    """
    real, nothing_yet = 0.0, 1.0
    for d in order:
        if d == NOBODY:
            break
        real += nothing_yet * hits[d, k]
        nothing_yet *= 1.0 - hits[d, 0]
    return real
