"""The best choice for a batch, as things are or as they would be with other caches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from outrider_runtime.control.acceptance.trees import Beams
from outrider_runtime.control.acceptance.trials import Counts
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.step_times import Costs
from outrider_runtime.control.data.batch import Batch, Columns, Ints
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.selection.candidates import Candidates, candidates
from outrider_runtime.control.selection.drafters import Choice, best_choice
from outrider_runtime.control.selection.offers import Pool, Terms, offered, served, terms
from outrider_runtime.control.settings import InForce, Settings
from outrider_runtime.control.slo import UnderWay


class Choices:
    def __init__(self, settings: Settings, evidence: Evidence, force: InForce, under_way: UnderWay) -> None:
        self.force, self._evidence, self._under_way = force, evidence, under_way
        drafters = settings.drafters
        self._passes = np.array([one.passes for one in drafters], dtype=bool)
        self._widest = np.array([one.widest for one in drafters], np.int64)
        self._depths = max(1, settings.max_draft_tokens)

    @property
    def longest(self) -> int:
        """Most draft tokens at present. Without a profile one more than was tried: further would be extrapolation."""
        evidence, most = self._evidence, self.force.most_tokens
        return min(most, evidence.longest + 1) if evidence.latency.learning else most

    def best(self, batch: Batch, closed: Ints, *, models: bool = True) -> Choice:
        """closed: (D, N), tokens of holes that draft models are fed first. models: those may run."""
        longest = self.longest
        weighed = candidates(self._passes, self._widest, longest, self._depths)
        return Choice(*_best(batch.columns, *self._known(batch, longest, models=models), closed, weighed))

    def pool(self, batch: Batch) -> tuple[Ints, Pool]:
        """The rows that may ask, and what drafters offer them as things are."""
        counts, costs, now, beams = self._known(batch, max(1, self.longest), models=True)
        known = Counts(*counts), Costs(*costs), Terms(*now), Beams(*beams)
        return offered(Columns(*batch.columns), *known, np.zeros(batch.missing.shape, np.int64))

    def _known(
        self, batch: Batch, longest: int, *, models: bool
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """What a choice looks at beside the batch: as `Counts`, `Costs`, `Terms`, `Beams`."""
        evidence, force = self._evidence, self.force
        if not models:
            force = dataclasses.replace(force, usable=force.usable & ~force.needs_kv)
        now = terms(batch, force, evidence.goodput.ratio, self._under_way, longest)
        return evidence.acceptance.columns, evidence.latency.columns, now, tuple(evidence.acceptance.beams())


@compiled
def _best(
    columns: tuple[Any, ...], counts: tuple[Any, ...], costs: tuple[Any, ...], terms: tuple[Any, ...],
    beams: tuple[Any, ...], closed: Ints, weighed: Candidates,
) -> tuple[Ints, Ints, Ints, float, float, bool, bool, float, bool]:  # fmt: skip
    """The fields of `Choice`. Arguments as `Columns`, `Counts`, `Costs`, `Terms`, `Beams`; closed: see
    `offers.offered`."""
    batch, now, holes = Columns(*columns), Terms(*terms), False
    who, pool = offered(batch, Counts(*counts), Costs(*costs), now, Beams(*beams), closed)
    for d in np.flatnonzero(now.needs_kv):
        for i in who:
            holes |= not served(batch.missing[d, i], 0, True)
    passes, widths, asked, value, plain_value, for_slo, runs, drafts_s = best_choice(pool, weighed)
    return passes, widths, asked, value, plain_value, for_slo, runs, drafts_s, holes
