"""The batch that one arm of a draft canary is planned for: as if every request were its own.

Otherwise the loop, which pays a drafter's fixed costs once for a whole batch, would run only the better drafter.
N requests, M nodes.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from outrider_runtime.control.data.batch import NO_ARM, NO_CLASS, STABLE, Batch, Bools, Ints
from outrider_runtime.control.data.forest import ROOT, Forest


def own_requests(batch: Batch, arm: int) -> Bools:
    """(N,): requests that are planned with the arm. Those from before the canary belong to the stable arm."""
    assert batch.arm is not None
    return np.asarray((batch.arm == arm) | ((batch.arm == NO_ARM) & (arm == STABLE)))


def to_draft_for(batch: Batch, own: Bools) -> Batch:
    """The batch that an arm chooses drafters for. Requests of the other arm stand for further ones of its own: without
    KV gaps in the arm's drafters, and without an SLO class. own: (N,), the arm's requests."""
    read = np.minimum(batch.missing, np.maximum(1, batch.prompt))
    return dataclasses.replace(
        batch,
        missing=np.where(own, batch.missing, read),
        slo_class=np.where(own, batch.slo_class, NO_CLASS),
        arm=None,
    )


class OwnForest(NamedTuple):
    """A batch and its proposals, in which copies of the arm's requests replace decoding requests of the other arm."""

    batch: Batch
    forest: Forest
    number: Ints
    """(M',): each node's number in the original forest."""
    is_real: Bools
    """(M',): nodes of the arm's requests themselves, not of copies."""


def to_verify(batch: Batch, forest: Forest, own: Bools, passes: Ints | None) -> OwnForest:
    """The batch and proposals that an arm chooses nodes to verify for. own: (N,), the arm's requests; some of them
    decode. passes: (D,), the arm's own draft lengths, since the other arm may have ordered more of a drafter; None: all
    proposals."""
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
        rank=forest.rank[number], confidence=forest.confidence[number], drafter_order=forest.drafter_order[:, source],
        lengths=forest.lengths if passes is None else np.minimum(forest.lengths, passes), placeholders=placeholders,
    )  # fmt: skip
    is_real = source[request] == request
    return OwnForest(dataclasses.replace(batch, **columns, arm=None), copied, number, is_real)


def _sources(batch: Batch, own: Bools) -> Ints:
    """(N,): the request that each row is a copy of: itself, or for a decoding request of the other arm one of the
    arm's, in turn."""
    source, decodes = np.arange(len(batch)), batch.decodes
    others = np.flatnonzero(~own & decodes)
    source[others] = np.resize(np.flatnonzero(own & decodes), len(others))
    return source


def _copied_nodes(forest: Forest, usable: Ints, source: Ints) -> tuple[Ints, Ints, Ints]:
    """(M',) each: a copied node's number in the original forest, its request, its parent. usable: numbers of the nodes
    to copy, each with its parent."""
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
