"""The draft plan at the end of a step: which drafters run, their draft lengths and requests, and what they are fed."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider_runtime.control.acceptance.estimate import GUARANTEED_TOKENS
from outrider_runtime.control.caches import SHORT_TOKENS, DraftKV, feed, nothing_fed
from outrider_runtime.control.choices import Choices
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.data.batch import NO_DRAFTER, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.data.plans import DraftPlan, Purpose
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.selection.drafters import Choice, plain_choice
from outrider_runtime.control.selection.offers import Pool, can_ask
from outrider_runtime.control.settings import DraftPrefill, InForce, Settings
from outrider_runtime.control.slo import UnderWay
from outrider_runtime.control.state import Weighed
from outrider_runtime.control.trial_schedule import Trial, upper_bounds


class Propose:
    def __init__(self, settings: Settings, evidence: Evidence, force: InForce, under_way: UnderWay) -> None:
        self._drafters = settings.drafters
        self._passes = np.array([drafter.passes for drafter in settings.drafters], dtype=bool)
        limits = (drafter.most_tokens for drafter in settings.drafters)
        self._most = np.array([settings.max_draft_tokens if most is None else most for most in limits], np.int64)
        """(D,): largest draft length of each drafter."""
        self._evidence, self.force, self._under_way = evidence, force, under_way
        self._choices = Choices(settings, evidence, force, under_way)
        self._kv = DraftKV(settings, evidence, self._choices, under_way)

    def settle(self, force: InForce) -> None:
        """Put settings in force from the next decision on."""
        self.force = self._choices.force = force

    @property
    def has_disabled_drafts(self) -> bool:
        """Some drafter that could be fed is not, since it has not been chosen for a while."""
        return self.force.chooses and bool((self._kv.disabled & self.force.usable).any())

    def plan(self, batch: Batch) -> DraftPlan:
        self._evidence.acceptance.age(batch.now_s)
        return self._closed_loop_plan(batch) if self.force.chooses else self._fixed_plan(batch)

    def weighed(self, batch: Batch) -> Weighed | None:
        """Estimates that decide about `batch`, the argument of `plan_draft`; None if no request can be drafted for."""
        rows, pool = self._choices.pool(batch)
        if not len(rows):
            return None
        brings = pool.paths[:, 0].mean(axis=1) * pool.offers[:, 0] if pool.longest else np.zeros(len(pool.passes))
        draft_s = pool.first_s + (pool.asking_s.sum(axis=1) if pool.asking_s.size else 0.0)
        return Weighed(pool.price.token_s, pool.price.rate, tuple(brings.tolist()), tuple(draft_s.tolist()))

    def _fixed_plan(self, batch: Batch) -> DraftPlan:
        """The plan when there is nothing to choose: a pin, mode Static, or no drafter that can run."""
        pin = self.force.pinned
        if pin is not None and pin.draft_tokens and self.force.usable[pin.drafter]:
            return self._plan_for_one(batch, pin.draft_tokens, pin.drafter, Purpose.FIXED, pin.width)
        if pin is not None or self.force.is_silent or not self.force.usable.any():
            return self._nothing_runs(batch)
        return self._plan_for_one(batch, self.force.most_tokens, self.force.first, Purpose.FIXED)

    def _closed_loop_plan(self, batch: Batch) -> DraftPlan:
        evidence = self._evidence
        choice, closing = self._kv.close(batch)
        speculating = choice.runs and not evidence.trials.off
        trial = evidence.trials.step(len(batch), speculating=speculating, for_slo=choice.for_slo)
        trial = trial or self._exploration(batch, choice)
        if trial is not None and trial.purpose is Purpose.PROBE:
            return self._plan(batch, self._nothing(choice), Purpose.PROBE)
        if trial is not None and self.force.usable[trial.drafter]:
            if speculating and not self._passes[trial.drafter]:
                return self._plan(batch, self._tried_first(batch, choice, trial.drafter), Purpose.EXPLORE, closing)
            return self._plan_for_one(batch, trial.draft_tokens, trial.drafter, Purpose.EXPLORE)
        purpose = Purpose.SLO if choice.for_slo else Purpose.CHOICE
        if not speculating:
            choice = self._nothing(choice)  # KV gaps are fed all the same, step by step if they are long
        self._under_way.drafts_s, self._under_way.lambda_over_plain = choice.drafts_s, choice.lambda_over_plain
        return self._plan(batch, choice, purpose, closing)

    def _exploration(self, batch: Batch, choice: Choice) -> Trial | None:
        """Start an exploration: of an untried drafter at once, else now and then of the drafter with the highest upper
        bound, if that beats the choice or nothing is chosen. None: no exploration starts."""
        acceptance, trials = self._evidence.acceptance, self._evidence.trials
        untried = self.force.usable & ~acceptance.has_history
        if not trials.may_explore(eager=bool(untried.any())) or not choice.drafter_order.shape[1]:
            return None
        if (choice.passes > 0)[self.force.usable].all():  # the choice runs every drafter
            trials.postpone()
            return None
        rows, pool = self._choices.pool(batch, choice.lambda_over_plain)
        pool = pool._replace(paths=self._explorable(batch, rows, pool))
        speculating = choice.runs and not trials.off
        # With k = 0, acceptance is not observed and may be out of date: only costs can rule a drafter out.
        paths = acceptance.upper_paths() if speculating else np.ones(acceptance.acceptance_rates.shape[:2])
        bounds = upper_bounds(pool, paths, self._choices.longest)
        bounds[untried & (bounds > -np.inf)] = np.inf
        bounds[choice.passes > 0] = -np.inf  # the choice runs these anyway
        drafter = int(bounds.argmax())
        if bounds[drafter] <= (choice.gain if speculating else 0.0):
            trials.postpone()
            return None
        return trials.explore(drafter, int((pool.paths[drafter, 0] > 0).sum()))

    def _tried_first(self, batch: Batch, choice: Choice, drafter: int) -> Choice:
        """The choice, changed so that some requests use a one-call drafter first and their own drafter second: this
        shows the drafter's worth together with the others. A request with a KV gap does not try it."""
        passes, requests = choice.passes.copy(), choice.drafter_order.shape[1]
        passes[drafter] = self._choices.longest
        first, second = choice.drafter_order
        gaps = self._kv.gaps(batch, can_ask(Columns(*batch.columns)))[drafter]
        tries = self._evidence.trials.some_of(requests) & (first != drafter) & ~gaps
        order = np.stack([np.where(tries, drafter, first), np.where(tries, first, second)])
        return choice._replace(passes=passes, drafter_order=order)

    def _explorable(self, batch: Batch, rows: Ints, pool: Pool) -> Floats:
        """The pool's paths; also positive for requests whose KV gap is small enough to be fed for a trial."""
        small = self.force.usable[:, None] & ~self._kv.gaps(batch, rows, SHORT_TOKENS)  # (D, N)
        return np.where(small[:, None] & (pool.paths == 0.0), 1e-9, pool.paths)

    def _plan(self, batch: Batch, choice: Choice, purpose: Purpose, closing: Ints | None = None) -> DraftPlan:
        """The plan of a choice. closing: (D, N), tokens of KV gaps to feed; None: nothing."""
        closing = nothing_fed(batch) if closing is None else closing
        passes = np.minimum(choice.passes, self._most)
        order, fed = _carried_out(
            batch.columns, passes, choice.drafter_order, closing, self._kv.columns, self.force.usable, self._always
        )
        return DraftPlan(passes, choice.widths, order, fed, purpose)

    def _nothing_runs(self, batch: Batch) -> DraftPlan:
        """The plan that runs no drafter, not even to feed it, whatever `draftPrefill` says."""
        passes = np.zeros(len(self._drafters), np.int64)
        return DraftPlan(passes, passes + 1, np.full((1, len(batch)), NO_DRAFTER), nothing_fed(batch), Purpose.FIXED)

    def _plan_for_one(
        self, batch: Batch, draft_tokens: int, drafter: int, purpose: Purpose, width: int = 1
    ) -> DraftPlan:
        """Trees of this depth and width from one drafter for every request that it can serve."""
        served = (batch.prompt_left == 0) & (batch.left > GUARANTEED_TOKENS)
        closes = np.zeros(batch.missing.shape, np.int64)
        if self._drafters[drafter].needs_kv:
            missing = batch.missing[drafter]
            closable = served & (missing <= SHORT_TOKENS) if purpose is Purpose.EXPLORE else served
            # A gap larger than the token budget is fed in parts; its request is drafted for after the last part.
            closes[drafter] = np.where(closable, np.minimum(missing, batch.token_budget), 0)
            served = closable & (missing <= batch.token_budget)
        passes = np.zeros(len(self._drafters), np.int64)
        passes[drafter] = min(draft_tokens, self._most[drafter]) * served.any()
        widths = np.ones_like(passes)
        widths[drafter] = width
        order = np.where(served & (passes[drafter] > 0), drafter, NO_DRAFTER)[None]
        fed = feed(batch.missing, batch.prompt, passes, closes, self._kv.columns, self.force.usable, self._always)
        if purpose is Purpose.FIXED:  # costs are not weighed, so a long prompt is fed chunk by chunk
            fed[drafter] = np.where(batch.prompt > 0, batch.missing[drafter], fed[drafter])
        return DraftPlan(passes, widths, order, fed, purpose)

    @property
    def _always(self) -> bool:
        return self.force.hot.draft_prefill is DraftPrefill.ALWAYS

    def _nothing(self, choice: Choice) -> Choice:
        """The choice of k = 0 for the same requests."""
        return plain_choice(len(self._drafters), choice.drafter_order.shape[1])


@compiled
def _carried_out(
    columns: tuple[Any, ...], passes: Ints, order: Ints, closing: Ints, kv: tuple[Ints, Bools, Bools], usable: Bools,
    always: bool,
) -> tuple[Ints, Ints]:  # fmt: skip
    """The drafters of each request (2, N), and the tokens that each drafter is fed (D, N). order: (2, n), drafters of
    the requests that may be drafted for. columns: fields of `Columns`."""
    batch = Columns(*columns)
    every, rows = np.full((2, len(batch.slot)), NO_DRAFTER), can_ask(batch)
    for n in range(len(rows)):
        every[0, rows[n]], every[1, rows[n]] = order[0, n], order[1, n]
    return every, feed(batch.missing, batch.prompt, passes, closing, kv, usable, always)
