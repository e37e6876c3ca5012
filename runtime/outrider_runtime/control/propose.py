"""What to propose at the end of a step: who runs how far, who asks whom, who is fed with what."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider_runtime.control import latency, trees
from outrider_runtime.control.acceptance import OF_THIS_STEP, Known, chain_paths
from outrider_runtime.control.batch import NOBODY, Batch, Bools, Columns, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import next_step, without_prompts
from outrider_runtime.control.draft_kv import SHORT_TOKENS, DraftKV, feed, served
from outrider_runtime.control.drafters import (
    Choice,
    Need,
    Pool,
    best_choice,
    candidates,
    drafts_s,
    nobody,
    nobody_behind,
)
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.explore import Block, upper_bounds
from outrider_runtime.control.latency import Costs
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.control.settings import DraftPrefill, InForce, Settings
from outrider_runtime.control.slo import UnderWay, anyone_late, behind, clocks, later, needed
from outrider_runtime.control.state import Weighed
from outrider_runtime.control.trials import ANY
from outrider_runtime.control.value import Price

LOOK_EVERY_STEPS = 8
"""Steps between two looks at what draft models would bring to requests whose caches have holes."""


class Propose:
    def __init__(self, settings: Settings, evidence: Evidence, force: InForce, under_way: UnderWay) -> None:
        self._drafters = settings.drafters
        self._passes = np.array([drafter.passes for drafter in settings.drafters], dtype=bool)
        self._evidence, self.force, self._under_way = evidence, force, under_way
        self._kv = DraftKV(settings.drafters)
        self._depths = max(1, settings.max_draft_tokens)
        self._chains = np.ones(len(settings.drafters), np.int64)
        self._widest = np.array([drafter.widest for drafter in settings.drafters], np.int64)
        self._beams = bool((self._widest > 1).any())
        shape = (len(settings.drafters), self._depths)
        self._no_beams = np.zeros((*shape, 1)), np.zeros(shape), np.zeros((len(settings.drafters), 1)), self._widest
        self._since_look = 0

    @property
    def gated(self) -> bool:
        """Some drafter that could be fed is not, as it has not been chosen for a while."""
        return self.force.chooses and bool((self._kv.gated & self.force.usable).any())

    def plan(self, batch: Batch) -> DraftPlan:
        self._evidence.acceptance.age(batch.now)
        return self._closed_loop_plan(batch) if self.force.chooses else self._fixed_plan(batch)

    def weighed(self, batch: Batch) -> Weighed | None:
        """What decides about `batch`, as given to `plan_draft`; None where nobody can be drafted for."""
        rows, pool = self._offered(batch, _nothing_fed(batch))
        if not len(rows):
            return None
        brings = (pool.paths * pool.offers)[:, :, 0].mean(axis=1) if pool.longest else np.zeros(len(pool.passes))
        draft_s = pool.first_s + (pool.asking_s.sum(axis=1) if pool.asking_s.size else 0.0)
        return Weighed(pool.price.token_s, pool.price.rate, tuple(brings.tolist()), tuple(draft_s.tolist()))

    def _fixed_plan(self, batch: Batch) -> DraftPlan:
        """The plan where nothing is to be chosen: nobody can be asked, a pin, or Static."""
        pin = self.force.pinned
        if pin is not None and pin.draft_tokens and self.force.usable[pin.drafter]:
            return self._plan_for_one(batch, pin.draft_tokens, pin.drafter, Purpose.FIXED, pin.width)
        if pin is not None or self.force.silent or not self.force.usable.any():
            return self._nobody_runs(batch)
        first = int(self.force.usable.argmax())
        return self._plan_for_one(batch, self.force.most_tokens, first, Purpose.FIXED)

    def _closed_loop_plan(self, batch: Batch) -> DraftPlan:
        evidence = self._evidence
        choice, closing = self._close_holes(batch, self._weigh(batch, _nothing_fed(batch)))
        widths = self._chains
        if self._beams:
            choice, widths = self._with_trees(batch, choice, closing)
        speculating = choice.runs and not evidence.probes.off
        block = evidence.explorer.step() or self._new_block(batch, choice)
        probes = evidence.probes.next_is_probe(len(batch), speculating=speculating and not choice.for_slo)
        if probes:
            return self._plan(batch, self._nothing(choice), Purpose.PROBE)
        block = block if block is not None and self.force.usable[block.drafter] else None
        if block is not None and speculating and not self._passes[block.drafter]:
            return self._plan(batch, self._asked_first(choice, block.drafter), Purpose.EXPLORE, closing)
        if block is not None:
            return self._plan_for_one(batch, block.draft_tokens, block.drafter, Purpose.EXPLORE)
        purpose = Purpose.SLO if choice.for_slo else Purpose.CHOICE
        if not speculating:
            choice = self._nothing(choice)  # holes are closed all the same, step by step where they are long
        self._under_way.drafts_s = choice.drafts_s
        return self._plan(batch, choice, purpose, closing, widths)

    def _with_trees(self, batch: Batch, choice: Choice, closing: Ints) -> tuple[Choice, Ints]:
        _, pool = self._offered(batch, np.where(closing >= batch.missing, closing, 0))
        choice, pool, widths = trees.chosen(choice, pool, self._offered_beams(batch))
        return choice._replace(drafts_s=drafts_s(pool, choice.passes, choice.asked)), widths

    def _offered_beams(self, batch: Batch) -> trees.Beams:
        """What beams offer; their places are (D, K, 1) where nobody can propose trees."""
        siblings, costs = self._evidence.acceptance.siblings, self._evidence.latency.costs
        hazards = np.ascontiguousarray(self._evidence.acceptance.hazards[:, :, ANY])
        if siblings is None:
            return trees.Beams(np.ones((*hazards.shape, 1)), hazards, np.zeros((len(hazards), 1)), self._widest)
        alone = without_prompts(next_step(Columns(*batch.columns), batch.token_budget))
        places = np.array([siblings.places(d, one) for d, one in enumerate(hazards)])
        pass_s = latency.wide_pass_s(costs, int(self._widest.max()), alone.n_context, alone.n_requests)
        return trees.Beams(places, hazards, pass_s, self._widest)

    def _weigh(self, batch: Batch, closed: Ints, *, models: bool = True) -> Choice:
        """The best choice. closed: (D, N), tokens of holes that draft models are fed first. models: they may run."""
        longest = self._limit
        known, rows = self._known(batch, closed, longest, models), candidates(self._passes, longest, self._depths)
        return Choice(*_weigh(batch.columns, rows, *known))

    def _offered(self, batch: Batch, closed: Ints) -> tuple[Ints, Pool]:
        """The rows that may ask, and what drafters offer them."""
        known, costs, *rest = self._known(batch, closed, max(1, self._limit), models=True)
        rows, pool = _offered(Columns(*batch.columns), Known(*known), Costs(*costs), *rest)
        return rows, pool

    def _known(self, batch: Batch, closed: Ints, longest: int, models: bool) -> tuple[Any, ...]:
        """What compiled code looks at beside the batch."""
        evidence, force, kv = self._evidence, self.force, self._kv.models
        usable = force.usable if models else force.usable & ~kv
        beams = tuple(self._offered_beams(batch)) if self._beams else self._no_beams
        return (
            evidence.acceptance.columns, evidence.latency.columns, (usable, kv, force.tpots_s),
            closed, (longest, batch.token_budget, batch.free_kv_tokens),
            (evidence.goodput.ratio, self._under_way.expected, self._under_way.drafts_s), beams,
        )  # fmt: skip

    def _close_holes(self, batch: Batch, choice: Choice) -> tuple[Choice, Ints]:
        """The choice after those holes in draft models' caches are closed that it pays to close, and (D, N) what is fed
        for that. Gates look at what would be chosen if no cache had a hole."""
        nothing = _nothing_fed(batch)
        self._since_look += 1
        if not choice.holes or self._evidence.probes.off:
            self._look_at_gates(choice)
            return choice, nothing
        if self._since_look < LOOK_EVERY_STEPS and not choice.passes[self._kv.models].any():
            return choice, nothing
        self._since_look = 0
        closing = self._closing(batch, choice)
        if not closing.any():
            return choice, nothing
        at_once = np.where(closing >= batch.missing, closing, 0)
        return self._weigh(batch, at_once), closing

    def _closing(self, batch: Batch, choice: Choice) -> Ints:
        """(D, N): what draft models are fed of holes, where that pays."""
        every, nothing = np.ascontiguousarray(batch.missing), _nothing_fed(batch)
        whole = self._weigh(batch, every)
        self._look_at_gates(whole)
        without = self._weigh(batch, nothing, models=False)
        rows, pool = self._offered(batch, nothing)
        missing = np.ascontiguousarray(every[:, rows])
        costs = pool.price.rate * latency.feeding_s(self._evidence.latency.costs, missing, float(len(rows)))
        closing, closes = self._kv.closing(batch, rows, whole, choice, without, costs), nothing.copy()
        closes[:, rows] = closing
        after = self._weigh(batch, np.where(closes > 0, every, 0)) if closing.any() else choice
        if not closing.any() or not self._kv.pays(batch, rows, closing, costs, after.value - choice.value):
            return nothing
        return closes

    def _look_at_gates(self, choice: Choice) -> None:
        if choice.asked.shape[1] and not choice.for_slo and not self._evidence.probes.off:
            self._kv.look(choice.passes)

    def _new_block(self, batch: Batch, choice: Choice) -> Block | None:
        """Start to explore: a drafter that is hardly known at once; else, every so often, the one with the highest
        upper bound, where that beats the choice or nothing is chosen."""
        acceptance, explorer = self._evidence.acceptance, self._evidence.explorer
        if not explorer.due(eager=not acceptance.all_met) or choice.for_slo or not choice.asked.shape[1]:
            return None
        unknown = self.force.usable & ~acceptance.met
        strangers = bool(unknown.any())
        if not explorer.due(eager=strangers):
            return None
        rows, pool = self._offered(batch, _nothing_fed(batch))
        pool = pool._replace(paths=self._explorable(batch, rows, pool))
        speculating = choice.runs and not self._evidence.probes.off
        # Where nothing is chosen, what was learned may be out of date: only costs say that there is nothing to find.
        paths = acceptance.upper_paths() if speculating else np.ones(acceptance.hazards.shape[:2])
        bounds = upper_bounds(pool, paths, self._limit)
        able = bounds > -np.inf
        bounds[unknown & able] = np.inf
        bounds[choice.passes > 0] = -np.inf  # the choice tries these anyway
        calls = np.flatnonzero(~self._passes & able & (choice.passes == 0))
        if speculating and len(calls) and not strangers:  # beside the choice it is worth more than alone
            return explorer.start(int(calls[0]), len(rows))
        drafter = int(bounds.argmax())
        if bounds[drafter] <= (choice.gain if speculating else 0.0):
            explorer.postpone()
            return None
        return explorer.start(drafter, int((pool.paths[drafter, :, 0] > 0).sum()))

    def _asked_first(self, choice: Choice, drafter: int) -> Choice:
        """The choice with a drafter of one call before whoever some requests ask: its worth beside the others is seen
        so."""
        passes, requests = choice.passes.copy(), choice.asked.shape[1]
        passes[drafter] = self._limit
        first, second = choice.asked
        tries = self._evidence.explorer.some_of(requests)
        asked = np.stack([np.where(tries, drafter, first), np.where(tries, first, second)])
        return choice._replace(passes=passes, asked=asked)

    def _explorable(self, batch: Batch, rows: Ints, pool: Pool) -> Floats:
        """The pool's paths, with those of requests whose hole is small enough to be closed for a trial."""
        small = self.force.usable[:, None] & ~self._kv.holes(batch, rows, SHORT_TOKENS)  # (D, N)
        return np.where(small[:, :, None] & (pool.paths == 0.0), 1e-9, pool.paths)

    def _plan(
        self, batch: Batch, choice: Choice, purpose: Purpose, closing: Ints | None = None, widths: Ints | None = None
    ) -> DraftPlan:  # fmt: skip
        """closing: (D, N), None: nothing. widths: (D,), None: chains."""
        closing = _nothing_fed(batch) if closing is None else closing
        widths = self._chains if widths is None else widths
        asked, fed = _carried_out(
            batch.columns, choice.passes, choice.asked, closing, self._kv.columns, self.force.usable, self._always
        )
        return DraftPlan(choice.passes, widths, asked, fed, purpose)

    def _nobody_runs(self, batch: Batch) -> DraftPlan:
        """Whatever `draftPrefill` says: who is switched off must not be run."""
        passes = np.zeros(len(self._drafters), np.int64)
        asked = np.full((1, len(batch)), NOBODY)
        return DraftPlan(passes, self._chains, asked, np.zeros_like(batch.missing), Purpose.FIXED)

    def _plan_for_one(
        self, batch: Batch, draft_tokens: int, drafter: int, purpose: Purpose, width: int = 1
    ) -> DraftPlan:  # fmt: skip
        """Trees of this depth and width from one drafter for every request that it can serve."""
        served = (batch.prompt_left == 0) & (batch.left > OF_THIS_STEP)
        closes = np.zeros(batch.missing.shape, np.int64)
        if self._drafters[drafter].needs_kv:
            most = SHORT_TOKENS if purpose is Purpose.EXPLORE else batch.token_budget
            served &= batch.missing[drafter] <= most
            closes[drafter] = np.where(served, batch.missing[drafter], 0)
        passes = np.zeros(len(self._drafters), np.int64)
        passes[drafter] = draft_tokens * served.any()
        widths = np.ones_like(passes)
        widths[drafter] = width
        asked = np.where(served & (passes[drafter] > 0), drafter, NOBODY)[None]
        missing = np.ascontiguousarray(batch.missing)
        fed = feed(missing, batch.prompt, passes, closes, self._kv.columns, self.force.usable, self._always)
        if purpose is Purpose.FIXED:  # nobody weighs it, so a long prompt is read chunk by chunk
            fed[drafter] = np.where(batch.prompt > 0, missing[drafter], fed[drafter])
        return DraftPlan(passes, widths, asked, fed, purpose)

    @property
    def _always(self) -> bool:
        return self.force.hot.draft_prefill is DraftPrefill.ALWAYS

    @property
    def _limit(self) -> int:
        """Most draft tokens at present. Without a profile one more than was tried: further would be extrapolation."""
        evidence = self._evidence
        most = self.force.most_tokens
        return min(most, evidence.longest + 1) if evidence.latency.learning else most

    def _nothing(self, choice: Choice) -> Choice:
        """k = 0 for the same requests."""
        return nobody(len(self._drafters), choice.asked.shape[1])


@compiled
def _can_ask(prompt_left: Ints, left: Ints) -> Ints:
    """Rows of the requests that decode in the next step and have tokens left for proposals."""
    rows, count = np.empty(len(left), np.int64), 0
    for i in range(len(left)):
        if prompt_left[i] == 0 and left[i] > OF_THIS_STEP:
            rows[count] = i
            count += 1
    return rows[:count]


def _nothing_fed(batch: Batch) -> Ints:
    return np.zeros(batch.missing.shape, np.int64)


@compiled
def _weigh(
    batch: tuple[Any, ...], rows: tuple[Ints, Bools], known: tuple[Any, ...], costs: tuple[Any, ...],
    force: tuple[Bools, Bools, Floats], closed: Ints, limits: tuple[int, int, int], pace: tuple[float, Floats, float],
    beams: tuple[Floats, Floats, Floats, Ints],
) -> tuple[Ints, Ints, float, float, bool, bool, bool, float]:  # fmt: skip
    """The fields of `Choice`."""
    who, pool = _offered(Columns(*batch), Known(*known), Costs(*costs), force, closed, limits, pace, beams)
    passes, asked = np.zeros(len(pool.passes), np.int64), np.full((2, len(who)), NOBODY)
    value, plain_value, for_slo, runs = best_choice(pool, rows, passes, asked)
    holes = False
    for d in range(len(passes)):
        for i in who if force[1][d] else who[:0]:
            holes |= not served(Columns(*batch).missing[d, i], 0, True)
    return passes, asked, value, plain_value, for_slo, runs, holes, drafts_s(pool, passes, asked)


@compiled
def _offered(
    batch: Columns, known: Known, costs: Costs, force: tuple[Bools, Bools, Floats], closed: Ints,
    limits: tuple[int, int, int], pace: tuple[float, Floats, float], beams: tuple[Floats, Floats, Floats, Ints],
) -> tuple[Ints, Pool]:  # fmt: skip
    """Rows that may ask, and what the drafters offer them for the next step.

    force: who is usable (D,), who needs a cache (D,), TPOTs by class. closed: (D, N), tokens of holes that draft models
    are fed first. limits: longest proposal, token budget, free tokens of KV. pace: goodput's ratio to plain decoding,
    tokens that requests are expected to get in the step under way (by slot), seconds of its drafts. beams: as `Beams`.
    """
    usable, needs_kv, tpots_s = force
    rows, base = _can_ask(batch.prompt_left, batch.left), next_step(batch, limits[1])
    paths, offers = chain_paths(known, batch, rows, usable, limits[0])
    budget = min(limits[1] - len(rows), limits[2] - 2 * int(base.n_batched))
    context = batch.context[rows]
    price = latency.price(costs, base, context, 0.0, pace[0], min(budget, len(rows) * limits[0]))
    first_s, pass_s, token_s = latency.draft_columns(costs, context, float(batch.prompt.sum()))
    need = _need(batch, rows, paths, price, tpots_s, pace, beams)
    for d in range(len(usable)):
        for n in range(len(rows)):
            if not served(batch.missing[d, rows[n]], closed[d, rows[n]], needs_kv[d]):
                paths[d, n] = 0.0
    asking_s = latency.asking_s(costs, context)
    pool = Pool(paths, offers, known.passes, first_s, pass_s, token_s, price, limits[0], max(0, budget), need, asking_s)
    return rows, pool


@compiled
def _need(
    batch: Columns, rows: Ints, paths: Floats, price: Price, tpots_s: Floats, pace: tuple[float, Floats, float],
    beams: tuple[Floats, Floats, Floats, Ints],
) -> Need:  # fmt: skip
    """Who will be behind when the next step begins. The step under way is taken to be like a plain one."""
    _, expected, drafts_s = pace
    step_s, requests = price.ragged_s[0] + drafts_s, len(rows)
    if not anyone_late(batch, tpots_s, 2 * step_s):
        return nobody_behind(requests)
    most = 1.0 + trees.most_gained(paths, trees.Beams(*beams))
    state = later(clocks(batch, rows, tpots_s), step_s, 1.0 + expected[batch.slot[rows]])
    return Need(behind(state, step_s, most), needed(state, 0.0) - 1.0, 1.0 / state.tpot_s)


@compiled
def _carried_out(
    batch: tuple[Any, ...], passes: Ints, asked: Ints, closing: Ints, kv: tuple[Ints, Bools, Bools], usable: Bools,
    always: bool,
) -> tuple[Ints, Ints]:  # fmt: skip
    """Whom each request of the batch asks (2, N), and what drafters run over (D, N). asked: (2, n), of those that may
    ask."""
    b = Columns(*batch)
    every, rows = np.full((2, len(b.slot)), NOBODY), _can_ask(b.prompt_left, b.left)
    for n in range(len(rows)):
        every[0, rows[n]], every[1, rows[n]] = asked[0, n], asked[1, n]
    return every, feed(b.missing, b.prompt, passes, closing, kv, usable, always)
