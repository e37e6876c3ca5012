"""The best choice for a batch, as things are or as they would be with other caches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from outrider_runtime.control.acceptance.trials import Counts
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost.step_times import Costs
from outrider_runtime.control.data.batch import Batch, Columns, Ints
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.selection.candidates import Variants, variants
from outrider_runtime.control.selection.drafters import Choice, best_choice
from outrider_runtime.control.selection.offers import Pool, Terms, offered, served, terms
from outrider_runtime.control.settings import InForce, Settings
from outrider_runtime.control.slo import UnderWay

EXCESS, DINKELBACH_STEPS = 1.05, 2
"""Most lambda / what the best choice gives; steps down to that."""


class Choices:
    def __init__(self, settings: Settings, evidence: Evidence, force: InForce, under_way: UnderWay) -> None:
        self.force, self._evidence, self._under_way = force, evidence, under_way
        drafters = settings.drafters
        autoregressive = np.array([one.passes for one in drafters], dtype=bool)
        stands_in = np.array([drafter.stands_in for drafter in drafters], dtype=bool)
        widest = np.array([drafter.widest for drafter in drafters], np.int64)
        self._variants = tuple(variants(autoregressive, stands_in, widest))

    @property
    def longest(self) -> int:
        """Most draft tokens at present. Without a profile one more than was tried: further would be extrapolation."""
        evidence, most = self._evidence, self.force.most_tokens
        return min(most, evidence.longest + 1) if evidence.latency.learning else most

    def best(self, batch: Batch, closed: Ints, *, caches: bool = True, goodput: float | None = None) -> Choice:
        """closed: (D, N), tokens of holes that draft models are fed first. caches: drafters with a cache of their own
        may run. goodput: lambda, by the goodput of plain decoding.

        None: as it was measured in the steps before. Where no choice gives so much at this batch, it is brought down
        to what the best one does (Dinkelbach's steps): too high a lambda favours short steps, k = 0 at last.
        """
        if goodput is not None:
            return self._at(goodput, batch, closed, caches=caches)
        choice = self._at(self._evidence.goodput.ratio, batch, closed, caches=caches)
        requests = float(np.count_nonzero(batch.prompt_left == 0))
        given = choice.gain >= requests * (choice.goodput / EXCESS - 1.0)
        for _ in range(0 if given or choice.for_slo else DINKELBACH_STEPS):
            best = (requests + choice.gain + choice.spent) / (requests + choice.spent / choice.goodput)
            before, choice = choice, self._at(best, batch, closed, caches=caches)
            if (before.passes == choice.passes).all():
                break
        return choice

    def _at(self, goodput: float, batch: Batch, closed: Ints, *, caches: bool) -> Choice:
        longest = self.longest
        known = self._known(batch, longest, goodput, caches=caches)
        return _best(batch.columns, *known, closed, self._variants)

    def pool(self, batch: Batch, goodput: float | None = None) -> tuple[Ints, Pool]:
        """The rows that may ask, and what drafters offer them as things are. goodput: as measured, if None."""
        goodput = self._evidence.goodput.ratio if goodput is None else goodput
        counts, costs, now = self._known(batch, max(1, self.longest), goodput, caches=True)
        known = Counts(*counts), Costs(*costs), Terms(*now)
        return offered(Columns(*batch.columns), *known, np.zeros(batch.missing.shape, np.int64))

    def _known(
        self, batch: Batch, longest: int, goodput: float, *, caches: bool
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """What a choice looks at beside the batch: as `Counts`, `Costs`, `Terms`."""
        evidence, force = self._evidence, self.force
        if not caches:
            force = dataclasses.replace(force, usable=force.usable & ~force.needs_kv)
        now = terms(batch, force, goodput, self._under_way, longest, evidence.fresh_prompts.share)
        return evidence.acceptance.columns, evidence.latency.columns, now


@compiled
def _best(
    columns: tuple[Any, ...], counts: tuple[Any, ...], costs: tuple[Any, ...], terms: tuple[Any, ...], closed: Ints,
    variants: tuple[Any, ...],
) -> Choice:  # fmt: skip
    """Arguments as `Columns`, `Counts`, `Costs`, `Terms`, `Variants`; closed: see `offers.offered`."""
    batch, now, known, holes = Columns(*columns), Terms(*terms), Costs(*costs), False
    who, pool = offered(batch, Counts(*counts), known, now, closed)
    for d in np.flatnonzero(now.needs_kv & ~known.hidden):
        for i in who:
            holes |= not served(batch.missing[d, i], 0, True)
    return best_choice(pool, Variants(*variants), holes, now.goodput)
