"""The best choice for a batch, with the drafters' caches as they are or as they would be after feeding them."""

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

MOST_EXCESS, DINKELBACH_STEPS = 1.05, 2
"""Largest lambda / goodput of the best choice that is left as it is; steps by which a larger one is brought down."""


class Choices:
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

    def best(
        self, batch: Batch, closed: Ints, *, caches: bool = True, lambda_over_plain: float | None = None
    ) -> Choice:
        """The best choice at lambda = `lambda_over_plain` * modelled goodput of plain decoding.

        closed: (D, N), tokens of KV gaps that draft models are fed first. caches: drafters with a cache of their own
        may run. lambda_over_plain: None: as measured in earlier steps. If no choice reaches that goodput with this
        batch, lambda is brought down to what the best choice reaches (Dinkelbach's steps): too high a lambda favours
        short steps, and in the end k = 0.
        """
        if lambda_over_plain is not None:
            return self._at(lambda_over_plain, batch, closed, caches=caches)
        choice = self._at(self._evidence.goodput.ratio, batch, closed, caches=caches)
        requests = float(np.count_nonzero(batch.prompt_left == 0))
        is_reached = choice.gain >= requests * (choice.lambda_over_plain / MOST_EXCESS - 1.0)
        for _ in range(0 if is_reached or choice.for_slo else DINKELBACH_STEPS):
            best = (requests + choice.gain + choice.extra_cost_tokens) / (
                requests + choice.extra_cost_tokens / choice.lambda_over_plain
            )
            before, choice = choice, self._at(best, batch, closed, caches=caches)
            if (before.passes == choice.passes).all():
                break
        return choice

    def _at(self, lambda_over_plain: float, batch: Batch, closed: Ints, *, caches: bool) -> Choice:
        longest = self.longest
        known = self._known(batch, longest, lambda_over_plain, caches=caches)
        return _best(batch.columns, *known, closed, self._variants)

    def pool(self, batch: Batch, lambda_over_plain: float | None = None) -> tuple[Ints, Pool]:
        """The rows that may be drafted for, and their `Pool`, with the caches as they are. lambda_over_plain: None: as
        measured."""
        lambda_over_plain = self._evidence.goodput.ratio if lambda_over_plain is None else lambda_over_plain
        counts, costs, limits = self._known(batch, max(1, self.longest), lambda_over_plain, caches=True)
        known = Counts(*counts), Costs(*costs), Terms(*limits)
        return offered(Columns(*batch.columns), *known, np.zeros(batch.missing.shape, np.int64))

    def _known(
        self, batch: Batch, longest: int, lambda_over_plain: float, *, caches: bool
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Everything that a choice depends on, apart from the batch: fields of `Counts`, `Costs`, `Terms`."""
        evidence, force = self._evidence, self.force
        if not caches:
            force = dataclasses.replace(force, usable=force.usable & ~force.needs_kv)
        limits = terms(batch, force, lambda_over_plain, self._under_way, longest, evidence.fresh_prompts.share)
        return evidence.acceptance.columns, evidence.latency.columns, limits


@compiled
def _best(
    columns: tuple[Any, ...], counts: tuple[Any, ...], costs: tuple[Any, ...], terms: tuple[Any, ...], closed: Ints,
    variants: tuple[Any, ...],
) -> Choice:  # fmt: skip
    """See `Choices.best`. Arguments: fields of `Columns`, `Counts`, `Costs`, `Terms`, `Variants`; closed: see
    `offers.offered`."""
    batch, limits, known, has_gaps = Columns(*columns), Terms(*terms), Costs(*costs), False
    rows, pool = offered(batch, Counts(*counts), known, limits, closed)
    for d in np.flatnonzero(limits.needs_kv & ~known.hidden):
        for i in rows:
            has_gaps |= not served(batch.missing[d, i], 0, True)
    return best_choice(pool, Variants(*variants), has_gaps, limits.lambda_over_plain)
