"""The batch as one arm of a draft canary sees it: as if every request were its own.

Else the loop, which pays a drafter's fixed pass once for a whole batch, would run only the drafter that is ahead.
N requests, M nodes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.data.batch import NOBODY, STABLE, Batch, Bools, Ints
from outrider_runtime.control.data.forest import ROOT, Forest


def own_requests(batch: Batch, arm: int) -> Bools:
    """(N,): requests that are decided with the arm; those from before the canary with the stable one."""
    assert batch.arm is not None
    return np.asarray((batch.arm == arm) | ((batch.arm == NOBODY) & (arm == STABLE)))


def to_draft_for(batch: Batch, own: Bools) -> Batch:
    """The batch that an arm chooses drafters for. Requests of the other arm stand for more of its own: the arm's
    drafters have read them, and no SLO class hurries the choice for them. own: (N,)."""
    read = np.minimum(batch.missing, np.maximum(1, batch.prompt))
    return dataclasses.replace(
        batch,
        missing=np.where(own, batch.missing, read),
        slo_class=np.where(own, batch.slo_class, NOBODY),
        arm=None,
    )


class OwnForest(NamedTuple):
    """A batch and its proposals, in which requests of the arm stand in for decoding ones of the other arm."""

    batch: Batch
    forest: Forest
    number: Ints
    """(M',): each node's number among the real ones."""
    is_real: Bools
    """(M',): nodes of the arm's requests themselves, not of their copies."""


def to_verify(batch: Batch, forest: Forest, own: Bools, passes: Ints | None) -> OwnForest:
    """own: (N,), some of which decode. passes: (D,), tokens that the arm ordered of each drafter, of
    which the other arm may have ordered more; None: all that are proposed."""
    source, usable = _sources(batch, own), own[forest.request]
    if passes is not None:
        usable &= forest.depth <= passes[forest.drafter]
    number, request, parent = _copied_nodes(forest, np.flatnonzero(usable), source)
    columns = {
        name: getattr(batch, name)[source] for name in ("slot", "slo_class", "context", "left", "emitted", "elapsed_s")
    }
    placeholders = None if forest.placeholders is None else forest.placeholders[source]
    copied = dataclasses.replace(
        forest, request=request, parent=parent, drafter=forest.drafter[number], depth=forest.depth[number],
        rank=forest.rank[number], confidence=forest.confidence[number], asked=forest.asked[:, source],
        lengths=forest.lengths if passes is None else np.minimum(forest.lengths, passes), placeholders=placeholders,
    )  # fmt: skip
    is_real = source[request] == request
    return OwnForest(dataclasses.replace(batch, **columns, arm=None), copied, number, is_real)


def _sources(batch: Batch, own: Bools) -> Ints:
    """(N,): the request that each row shows: itself, or for a decoding one of the other arm one of the arm in turn."""
    source, decodes = np.arange(len(batch)), batch.decodes
    others = np.flatnonzero(~own & decodes)
    source[others] = np.resize(np.flatnonzero(own & decodes), len(others))
    return source


def _copied_nodes(forest: Forest, usable: Ints, source: Ints) -> tuple[Ints, Ints, Ints]:
    """(M',) each: number among the real nodes, request, parent. usable: numbers of nodes, each with its parent."""
    kept = usable[np.argsort(forest.request[usable], kind="stable")]
    counts = np.bincount(forest.request[kept], minlength=len(source))
    first = np.cumsum(counts) - counts
    place = np.zeros(len(forest), np.int64)  # within its request
    place[kept] = np.arange(len(kept)) - first[forest.request[kept]]
    lengths = counts[source]
    begins = np.cumsum(lengths) - lengths
    request = np.repeat(np.arange(len(source)), lengths)
    number = kept[first[source][request] + np.arange(len(request)) - begins[request]]
    parent = forest.parent[number]
    return number, request, np.where(parent == ROOT, ROOT, begins[request] + place[parent])
