"""The draft plan at the end of a step: which drafters run, their draft lengths and requests, and what they are fed.

A draft model can be fed tokens that its cache lacks (its KV gap, TurboSpec section 4.2). So a gap is a price of using
it, spread over the rest of the answer (`draft_options`), and it is fed before the model proposes. A head reads the
target's hidden states, which are gone after the step: it is fed a prompt in the prompt's own step or never, and it is
fed while it is in use. A drafter that several choices in a row leave out, as happens under load, is disabled: it is not
fed, and a step costs what plain decoding costs. It is enabled again once it is chosen.

D drafters, N requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from outrider_runtime.control.acceptance import Counts, hit_rates
from outrider_runtime.control.admission import LEAST_PROMPT_SHARE
from outrider_runtime.control.batch import NO_DRAFTER, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.choose_drafters import Choice, DrafterSearch, plain_choice
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.draft_options import GAP_TOKENS, can_ask
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.control.settings import DraftPrefill, InForce, Settings
from outrider_runtime.control.slo import UnderWay, clocks, slack_s
from outrider_runtime.control.state import Weighed
from outrider_runtime.control.step_times import Costs, decode_s, fed_token_s, this_step, without_prompts
from outrider_runtime.control.trials import Trial, upper_bounds

SHORT_TOKENS = 256
"""Largest KV gap that is fed for a trial."""
LEAST_CHUNK_TOKENS = 32
"""Smallest part of a KV gap that is fed in one step: a shorter one would mostly pay for the call, while the gap grows
at every step."""
HELD_DECISIONS = 4
"""Decisions that one choice stands for while its batch stays the same, the first included."""
RATE_ERROR = 0.03
"""Largest change of an acceptance or hit rate, and of lambda / plain goodput, that leaves the choice as it is: the
standard error of a rate of 0.8 that rests on as many trials as any (`acceptance.MOST_TRIALS`)."""
UNUSED_DECISIONS = 8
"""Choices in a row that leave a drafter out before it is disabled."""


class Propose:
    def __init__(self, settings: Settings, evidence: Evidence, force: InForce, under_way: UnderWay) -> None:
        self._drafters = settings.drafters
        limits = (drafter.most_tokens for drafter in settings.drafters)
        self._most = np.array([settings.max_draft_tokens if most is None else most for most in limits], np.int64)
        """(D,): largest draft length of each drafter."""
        self._evidence, self.force, self._under_way = evidence, force, under_way
        self._search = DrafterSearch(settings, evidence, force, under_way)
        self._kv = DraftKV(settings, evidence, self._search, under_way)

    def settle(self, force: InForce) -> None:
        """Put settings in force from the next decision on."""
        self.force = self._search.force = force
        self._kv.last_choice = None

    @property
    def has_disabled_drafts(self) -> bool:
        """Some drafter that could be fed is not, since it has not been chosen for a while."""
        return self.force.chooses and bool((self._kv.disabled & self.force.usable).any())

    def plan(self, batch: Batch) -> DraftPlan:
        self._evidence.acceptance.age(batch.now_s)
        return self._closed_loop_plan(batch) if self.force.chooses else self._fixed_plan(batch)

    def weighed(self, batch: Batch) -> Weighed | None:
        """Estimates that decide about `batch`, the argument of `plan_draft`; None if no request can be drafted for."""
        rows, options = self._search.options(batch)
        if not len(rows):
            return None
        accepted = (
            options.paths[:, 0].mean(axis=1) * options.hit_rates[:, 0] if options.longest else 0.0 * options.first_s
        )
        draft_s = options.first_s + sum(part.sum(axis=1) for part in (options.use_s, options.catch_up_s) if part.size)
        return Weighed(options.price.token_s, options.price.rate, tuple(accepted.tolist()), tuple(draft_s.tolist()))

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
        choice, catch_up_tokens = self._kv.choose(batch)
        speculating = choice.runs and not evidence.trials.off
        trial = evidence.trials.step(len(batch), speculating=speculating, for_slo=choice.for_slo)
        trial = trial or self._exploration(batch, choice)
        if trial is not None and trial.purpose is Purpose.PROBE:
            return self._plan(batch, self._nothing(choice), Purpose.PROBE)
        if trial is not None and self.force.usable[trial.drafter]:
            return self._plan_for_one(batch, trial.draft_tokens, trial.drafter, Purpose.EXPLORE)
        purpose = Purpose.SLO if choice.for_slo else Purpose.CHOICE
        if not speculating:
            choice = self._nothing(choice)  # KV gaps are fed all the same, step by step if they are long
        self._under_way.drafts_s, self._under_way.lambda_over_plain = choice.drafts_s, choice.lambda_over_plain
        return self._plan(batch, choice, purpose, catch_up_tokens)

    def _exploration(self, batch: Batch, choice: Choice) -> Trial | None:
        """Start an exploration: of an untried drafter once it might pay, else now and then of the drafter with the
        highest upper bound, if that beats the choice or nothing is chosen. None: no exploration starts."""
        acceptance, trials = self._evidence.acceptance, self._evidence.trials
        if not trials.may_explore(eager=True):
            return None
        # A drafter that the choice runs is tried by that.
        untried = self.force.usable & ~acceptance.has_history & (choice.draft_lengths == 0)
        if not trials.may_explore(eager=bool(untried.any())) or not choice.drafter_order.shape[1]:
            return None
        if (choice.draft_lengths > 0)[self.force.usable].all():  # the choice runs every drafter
            trials.postpone()
            return None
        rows, options = self._search.options(batch, choice.lambda_over_plain)
        too_long = self._kv.gaps(batch, rows, SHORT_TOKENS)  # to be fed for a trial
        options = options._replace(paths=np.where(too_long[:, None], 0.0, options.paths))
        speculating = choice.runs and not trials.off
        # With k = 0, acceptance is not observed and may be out of date: only costs can rule a drafter out.
        paths = acceptance.upper_paths() if speculating else np.ones(acceptance.acceptance_rates.shape)
        bounds = upper_bounds(options, paths, self._search.longest)
        untried &= bounds > 0.0
        if not untried.any() and not trials.may_explore(eager=False):
            return None  # no untried drafter could pay in this step: the others keep their interval
        bounds[untried] = np.inf
        bounds[choice.draft_lengths > 0] = -np.inf  # the choice runs these anyway
        drafter = int(bounds.argmax())
        if bounds[drafter] <= (choice.gain if speculating else 0.0):
            trials.postpone()
            return None
        return trials.explore(drafter, int((options.paths[drafter, 0] > 0).sum()))

    def _plan(self, batch: Batch, choice: Choice, purpose: Purpose, catch_up_tokens: Ints | None = None) -> DraftPlan:
        """The plan of a choice. catch_up_tokens: (D, N), tokens of KV gaps to feed; None: nothing."""
        catch_up_tokens = nothing_fed(batch) if catch_up_tokens is None else catch_up_tokens
        draft_lengths = np.minimum(choice.draft_lengths, self._most)
        order, fed = _carried_out(
            batch.columns, draft_lengths, choice.drafter_order, catch_up_tokens, self._kv.columns, self.force.usable,
            self._always,
        )  # fmt: skip
        return DraftPlan(draft_lengths, choice.widths, order, fed, purpose)

    def _nothing_runs(self, batch: Batch) -> DraftPlan:
        """The plan that runs no drafter, not even to feed it, whatever `draftPrefill` says."""
        none, no_order = np.zeros(len(self._drafters), np.int64), np.full((1, len(batch)), NO_DRAFTER)
        return DraftPlan(none, none + 1, no_order, nothing_fed(batch), Purpose.FIXED)

    def _plan_for_one(
        self, batch: Batch, draft_tokens: int, drafter: int, purpose: Purpose, width: int = 1
    ) -> DraftPlan:
        """Trees of this depth and width from one drafter for every request that it can serve, once its KV gap is fed;
        a trial feeds short gaps only."""
        rows = can_ask(Columns(*batch.columns))
        order = np.full((2, len(rows)), NO_DRAFTER)
        order[0] = drafter
        trial = purpose is Purpose.EXPLORE
        if trial:
            order[0, self._kv.gaps(batch, rows, SHORT_TOKENS)[drafter]] = NO_DRAFTER
        catch_up_tokens, _ = self._kv.catch_up(batch, order, weighs_tpots=trial)
        still_lacks = catch_up_tokens[drafter, rows] < batch.missing[drafter, rows]
        order[0, self._kv.gaps(batch, rows)[drafter] & still_lacks] = NO_DRAFTER
        draft_lengths = np.zeros(len(self._drafters), np.int64)
        draft_lengths[drafter] = draft_tokens * (order[0] == drafter).any()
        widths = np.ones_like(draft_lengths)
        widths[drafter] = width
        plan = self._plan(batch, Choice(draft_lengths, widths, order, 0.0, 0.0), purpose, catch_up_tokens)
        if not trial:  # costs are not weighed, so a long prompt is fed chunk by chunk
            plan.feed[drafter] = np.where(batch.prompt > 0, batch.missing[drafter], plan.feed[drafter])
        return dataclasses.replace(plan, drafter_order=plan.drafter_order[:1])

    @property
    def _always(self) -> bool:
        return self.force.hot.draft_prefill is DraftPrefill.ALWAYS

    def _nothing(self, choice: Choice) -> Choice:
        """The choice of k = 0 for the same requests."""
        return plain_choice(len(self._drafters), choice.drafter_order.shape[1])


@compiled
def _carried_out(
    columns: tuple[Any, ...], draft_lengths: Ints, order: Ints, catch_up_tokens: Ints, kv: tuple[Ints, Bools, Bools],
    usable: Bools, always: bool,
) -> tuple[Ints, Ints]:  # fmt: skip
    """The drafters of each request (2, N), and the tokens that each drafter is fed (D, N). order: (2, n), drafters of
    the requests that may be drafted for. columns: fields of `Columns`."""
    batch = Columns(*columns)
    every, rows = np.full((2, len(batch.slot)), NO_DRAFTER), can_ask(batch)
    for n in range(len(rows)):
        every[0, rows[n]], every[1, rows[n]] = order[0, n], order[1, n]
    return every, feed(batch.missing, batch.prompt, draft_lengths, catch_up_tokens, kv, usable, always)


class LastChoice(NamedTuple):
    """A choice that stands for some decisions."""

    choice: Choice
    slots: Ints
    """(N,): slots of its requests."""
    rates: Floats
    """(2, D, K): acceptance and hit rates that it was made from."""
    lambda_over_plain: float
    """Lambda / modelled goodput of plain decoding, as measured then."""
    decisions: int
    """Decisions that it may stand for from now on."""


class DraftKV:
    """Decides which drafters are fed which requests' tokens."""

    def __init__(self, settings: Settings, evidence: Evidence, search: DrafterSearch, under_way: UnderWay) -> None:
        self._evidence, self._search, self._under_way = evidence, search, under_way
        self._unused = np.zeros(len(settings.drafters), np.int64)
        self.last_choice: LastChoice | None = None
        self.needs_kv = np.array([drafter.needs_kv for drafter in settings.drafters], dtype=bool)
        self._with_kv = np.flatnonzero(self.needs_kv)
        self._hidden = np.array([drafter.needs_hidden for drafter in settings.drafters], dtype=bool)

    @property
    def disabled(self) -> Bools:
        """(D,): drafters with a cache that are not fed, since they were left out for a while."""
        return np.asarray((self.needs_kv | self._hidden) & (self._unused >= UNUSED_DECISIONS))

    @property
    def columns(self) -> tuple[Ints, Bools, Bools]:
        """Argument `kv` of `feed`."""
        return self._unused, self.needs_kv, self._hidden

    def gaps(self, batch: Batch, rows: Ints, most: int = GAP_TOKENS) -> Bools:
        """(D, N): the drafter's cache lacks more than `most` tokens, so that its proposals would be junk."""
        return np.asarray((batch.missing[:, rows] > most) & self.needs_kv[:, None])

    def choose(self, batch: Batch) -> tuple[Choice, Ints]:
        """The best choice, and (D, N) the tokens of KV gaps that draft models are fed before they propose.

        If a step does not hold all gaps of the choice, the rest is fed in later steps, and the choice is made again
        without these requests."""
        choice = self._choice(batch)
        if self._evidence.trials.off:
            return choice, nothing_fed(batch)
        self.note_use(choice)
        if not choice.runs or batch.missing[self._with_kv].max(initial=0) <= GAP_TOKENS:
            return choice, nothing_fed(batch)
        fed, is_whole = self.catch_up(batch, choice.drafter_order)
        if not is_whole:
            closed = np.where(fed >= batch.missing, fed, 0)
            choice = self._search.best(batch, closed, choice.lambda_over_plain)
        return choice, fed

    def _choice(self, batch: Batch) -> Choice:
        """The last choice while it cannot have changed, else the best one."""
        known, ratio, last = self._evidence.acceptance.columns, self._evidence.goodput.ratio, self.last_choice
        if (
            last is not None and last.decisions and abs(ratio - last.lambda_over_plain) <= RATE_ERROR
            and _is_unchanged(batch.columns, known, last.slots, last.rates, self.needs_kv, self._search.longest)
        ):  # fmt: skip
            self.last_choice = last._replace(decisions=last.decisions - 1)
            return last.choice
        choice = self._search.best(batch)
        changes = self._search.force.has_classes  # with the time that each request has left
        self.last_choice = None if changes else LastChoice(choice, batch.slot, _rates(known), ratio, HELD_DECISIONS - 1)
        return choice

    def catch_up(self, batch: Batch, order: Ints, *, weighs_tpots: bool = True) -> tuple[Ints, bool]:
        """See `_catch_up`. weighs_tpots: feed no more than TPOTs allow, see `feeding_room`."""
        tpots_s = self._search.force.tpots_s
        room = feeding_room(
            batch.columns, self._evidence.latency.columns, tpots_s if weighs_tpots else np.full_like(tpots_s, np.inf),
            self._under_way.expected, self._under_way.drafts_s, batch.token_budget,
        )  # fmt: skip
        return _catch_up(batch.columns, order, self.needs_kv & ~self._hidden, room, batch.token_budget)

    def note_use(self, choice: Choice) -> None:
        """Count, for each drafter, a choice that leaves it out. Choices for late requests do not count."""
        if choice.drafter_order.shape[1] and not choice.for_slo:
            _note_use(self._unused, choice.draft_lengths)


@compiled
def _rates(counts: tuple[Any, ...]) -> Floats:
    """(2, D, K): acceptance and hit rates. counts: fields of `Counts`."""
    known = Counts(*counts)
    return np.stack((known.acceptance_rates, hit_rates(known)))


@compiled
def _is_unchanged(
    columns: tuple[Any, ...], counts: tuple[Any, ...], slots: Ints, rates: Floats, needs_kv: Bools, longest: int
) -> bool:
    """Whether the requests in `slots` (N,) decode as before, have tokens left for any proposal and no KV gap, and none
    of the `rates` (2, D, K) has moved. columns, counts: fields of `Columns`, `Counts`."""
    batch = Columns(*columns)
    if len(slots) != len(batch.slot):
        return False
    for i in range(len(slots)):
        decodes = batch.prompt[i] == 0 and batch.prompt_left[i] == 0 and batch.left[i] > longest
        if slots[i] != batch.slot[i] or not decodes:
            return False
        for d in np.flatnonzero(needs_kv):
            if batch.missing[d, i] > GAP_TOKENS:
                return False
    return bool((np.abs(_rates(counts) - rates) <= RATE_ERROR).all())


@compiled
def _catch_up(
    columns: tuple[Any, ...], order: Ints, needs_kv: Bools, room: Ints, budget: int
) -> tuple[Ints, bool]:  # fmt: skip
    """(D, N): tokens, from the first missing one on, that draft models are fed of the requests that use them over a KV
    gap, the shortest gap first; and whether that feeds all of these gaps.

    columns: fields of `Columns`. order: (2, n), drafters of the requests that may be drafted for. room: (D,), see
    `feeding_room`. budget: most tokens for all drafters."""
    batch = Columns(*columns)
    fed, is_whole, rows = np.zeros(batch.missing.shape, np.int64), True, can_ask(batch)
    for d in np.flatnonzero(needs_kv):
        gaps, left = np.zeros(len(rows), np.int64), min(room[d], budget)
        for n in range(len(rows)):
            if order[0, n] == d or order[1, n] == d:
                gaps[n] = batch.missing[d, rows[n]]
        for n in np.argsort(gaps, kind="mergesort"):
            chunk = min(gaps[n], left)
            if gaps[n] <= GAP_TOKENS:
                continue
            if chunk >= min(gaps[n], LEAST_CHUNK_TOKENS):
                fed[d, rows[n]] = chunk
                left -= chunk
                budget -= chunk
            is_whole &= fed[d, rows[n]] >= gaps[n]
    return fed, is_whole


@compiled
def feeding_room(
    columns: tuple[Any, ...], costs: tuple[Any, ...], tpots_s: Floats, expected: Floats, drafts_s: float, budget: int
) -> Ints:
    """(D,): most tokens, up to `budget`, that a step may feed to each drafter without making a request miss its TPOT.

    The rule is that of prompts (`admission`): what lengthens the step by at most a fifth is always fed, and requests
    that are late anyway limit nothing. columns, costs: fields of `Columns`, `Costs`. expected, drafts_s: see
    `UnderWay`."""
    batch, known = Columns(*columns), Costs(*costs)
    room = np.full(len(known.drafts), budget)
    rows = np.flatnonzero(batch.prompt + batch.prompt_left == 0)
    state = clocks(batch, rows, tpots_s)
    if not np.isfinite(state.tpot_s).any():
        return room
    step_s = decode_s(known, without_prompts(this_step(batch)), 0.0) + drafts_s
    slack, spare_s = slack_s(state, step_s / (1.0 + expected[batch.slot[rows]])), np.inf
    for n in range(len(rows)):
        if slack[n] >= 0.0:
            spare_s = min(spare_s, slack[n])
    for d in range(len(room)):
        token_s = fed_token_s(known, d)
        if token_s > 0.0:
            room[d] = int(min(float(budget), max(spare_s, LEAST_PROMPT_SHARE * step_s) / token_s))
    return room


def nothing_fed(batch: Batch) -> Ints:
    return np.zeros(batch.missing.shape, np.int64)


@compiled
def _note_use(unused: Ints, draft_lengths: Ints) -> None:
    for d in range(len(unused)):
        unused[d] = 0 if draft_lengths[d] > 0 else unused[d] + 1


@compiled
def feed(
    missing: Ints, prompt: Ints, draft_lengths: Ints, catch_up_tokens: Ints, kv: tuple[Ints, Bools, Bools],
    usable: Bools, always: bool,
) -> Ints:  # fmt: skip
    """(D, N): tokens that each drafter is fed of each request.

    draft_lengths: (D,). catch_up_tokens: (D, N), tokens of KV gaps to feed. kv: see `DraftKV.columns`. usable: (D,).
    always: feed all that can be fed.
    """
    fed, (unused, needs_kv, hidden) = np.zeros(missing.shape, np.int64), kv
    for d in np.flatnonzero(usable):
        fed[d] = catch_up_tokens[d]
        reads = hidden[d] and unused[d] < UNUSED_DECISIONS
        for i in range(missing.shape[1]):
            if prompt[i] > 0:
                is_fed = reads or (hidden[d] and draft_lengths[d] > 0)
            else:
                is_fed = draft_lengths[d] > 0 and (hidden[d] or missing[d, i] <= GAP_TOKENS)
            if (needs_kv[d] or hidden[d]) and (is_fed or always):
                fed[d, i] = missing[d, i]
    return fed
