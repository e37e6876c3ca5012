"""What to propose at the end of a step: who runs how far, who asks whom, who is fed with what."""

from __future__ import annotations

import numpy as np

from outrider_runtime.control import trees
from outrider_runtime.control.acceptance import OF_THIS_STEP
from outrider_runtime.control.batch import NOBODY, Batch, Bools, Floats, Ints
from outrider_runtime.control.compiled import compiled
from outrider_runtime.control.cost import next_step, this_step, without_prompts
from outrider_runtime.control.draft_kv import SHORT_TOKENS, DraftKV
from outrider_runtime.control.drafters import Choice, Need, Pool, choose, drafts_s, nobody
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.explore import Block, upper_bounds
from outrider_runtime.control.plans import DraftPlan, Purpose
from outrider_runtime.control.settings import DraftPrefill, InForce, Mode, Settings
from outrider_runtime.control.slo import UnderWay, anyone_late, clocks
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
        self._widest = np.array([drafter.widest for drafter in settings.drafters], np.int64)
        self._beams = bool((self._widest > 1).any())
        self._kv = DraftKV(settings.drafters)
        self._since_look = 0

    @property
    def gated(self) -> bool:
        """Some drafter that could be fed is not, as it has not been chosen for a while."""
        chooses = self.force.pinned is None and self.force.hot.mode is Mode.CLOSED_LOOP and not self.force.silent
        return chooses and bool((self._kv.gated & self.force.usable).any())

    def plan(self, batch: Batch) -> DraftPlan:
        self._evidence.acceptance.age(batch.now)
        return self._fixed_plan(batch) or self._closed_loop_plan(batch)

    def weighed(self, batch: Batch) -> Weighed | None:
        """What decides about `batch`, as given to `plan_draft`; None where nobody can be drafted for."""
        rows = _can_ask(batch.prompt_left, batch.left)
        if not len(rows):
            return None
        base = next_step(batch)
        paths, offers = self._evidence.acceptance.paths(batch, rows, self.force.usable, max(1, self._limit))
        price = self._evidence.price(base, batch.context[rows], 0.0, 1)
        brings = (paths * offers)[:, :, 0].mean(axis=1)
        draft_s = self._evidence.latency.draft_columns(batch.context[rows])[0]
        asking_s = self._evidence.latency.asking_s(batch.context[rows])
        draft_s = draft_s + asking_s.sum(axis=1) if asking_s.size else draft_s
        return Weighed(price.token_s, price.rate, tuple(brings.tolist()), tuple(draft_s.tolist()))

    def _fixed_plan(self, batch: Batch) -> DraftPlan | None:
        """The plan where nothing is to be chosen: nobody can be asked, a pin, or Static."""
        pin = self.force.pinned
        if pin is not None and pin.draft_tokens and self.force.usable[pin.drafter]:
            return self._plan_for_one(batch, pin.draft_tokens, pin.drafter, Purpose.FIXED, pin.width)
        if pin is not None or self.force.silent or not self.force.usable.any():
            return self._nobody_runs(batch)
        if self.force.hot.mode is Mode.STATIC:
            first = int(self.force.usable.argmax())
            return self._plan_for_one(batch, self.force.most_tokens, first, Purpose.FIXED)
        return None

    def _closed_loop_plan(self, batch: Batch) -> DraftPlan:
        evidence = self._evidence
        rows = _can_ask(batch.prompt_left, batch.left)
        prompts = this_step(batch).n_prompt
        pool, paths = self._pool(batch, rows, prompts)
        choice = choose(pool)
        choice, pool, closing = self._close_holes(batch, rows, pool, paths, choice)
        widths = np.ones_like(choice.passes)
        if self._beams:
            choice, pool, widths = trees.chosen(choice, pool, self._offered_beams(batch))
        speculating = choice.runs and not evidence.probes.off
        block = evidence.explorer.step() or self._new_block(batch, rows, pool, choice)
        probes = evidence.probes.next_is_probe(len(batch), speculating=speculating and not choice.for_slo)
        if probes:
            return self._plan(batch, rows, self._nothing(len(rows)), Purpose.PROBE)
        block = block if block is not None and self.force.usable[block.drafter] else None
        if block is not None and speculating and not self._passes[block.drafter]:
            return self._plan(batch, rows, self._asked_first(choice, block.drafter), Purpose.EXPLORE, closing)
        if block is not None:
            return self._plan_for_one(batch, block.draft_tokens, block.drafter, Purpose.EXPLORE)
        if not speculating:
            choice = self._nothing(len(rows))  # holes are closed all the same, step by step where they are long
        purpose = Purpose.SLO if choice.for_slo else Purpose.CHOICE
        plan = self._plan(batch, rows, choice, purpose, closing, widths)
        if self.force.has_classes:
            self._under_way.drafts_s = drafts_s(pool, choice)
        return plan

    def _pool(self, batch: Batch, rows: Ints, prompts: float) -> tuple[Pool, Floats]:
        """What the drafters offer for the next step, and its paths as if no cache had a hole."""
        limit, base = self._limit, next_step(batch)
        paths, offers = self._evidence.acceptance.paths(batch, rows, self.force.usable, limit)
        budget = min(batch.token_budget - len(rows), batch.free_kv_tokens - 2 * round(base.n_batched))
        price = self._evidence.price(base, batch.context[rows], 0.0, min(budget, len(rows) * limit))
        seconds = self._evidence.latency.draft_columns(batch.context[rows], prompts)
        pool = Pool(
            paths, offers, self._passes, *seconds, price, limit,
            max(0, budget), self._need(batch, rows, paths, price) if self.force.has_classes else None,
            self._evidence.latency.asking_s(batch.context[rows]),
        )  # fmt: skip
        if not self._kv.any_kv:
            return pool, paths
        holes = self._kv.holes(batch, rows)
        return pool._replace(paths=np.where(holes[:, :, None], 0.0, paths)), paths

    def _need(self, batch: Batch, rows: Ints, paths: Floats, price: Price) -> Need | None:
        """Who will be behind when the next step begins; None for nobody."""
        step_s = price.plain_s + self._under_way.drafts_s  # the step under way is taken to be like a plain one
        if not anyone_late(batch.slo_class, batch.elapsed_s, batch.emitted, self.force.tpots_s, 2 * step_s):
            return None
        state = clocks(batch, rows, self.force.tpots_s).later(step_s, 1.0 + self._under_way.expected[batch.slot[rows]])
        most = trees.most_gained(paths, self._offered_beams(batch)) if self._beams else paths.sum(axis=2).max(axis=0)
        behind = state.behind(step_s, 1.0 + most)
        return Need(behind, state.needed(0.0) - 1.0, 1.0 / state.tpot_s) if behind.any() else None

    def _offered_beams(self, batch: Batch) -> trees.Beams:
        acceptance, alone = self._evidence.acceptance, without_prompts(next_step(batch))
        assert acceptance.siblings is not None
        hazards = np.ascontiguousarray(acceptance.hazards[:, :, ANY])
        places = np.array([acceptance.siblings.places(d, one) for d, one in enumerate(hazards)])
        widest = int(self._widest.max())
        pass_s = self._evidence.latency.wide_pass_s(alone.n_context, alone.n_requests, widest)
        return trees.Beams(places, hazards, pass_s, self._widest)

    def _close_holes(
        self, batch: Batch, rows: Ints, pool: Pool, paths: Floats, choice: Choice
    ) -> tuple[Choice, Pool, Ints | None]:
        """The choice after those holes in draft models' caches are closed that it pays to close. Gates look at what
        would be chosen if no cache had a hole."""
        self._since_look += 1
        if not self._kv.any_kv or self._evidence.probes.off or not self._kv.holes(batch, rows).any():
            self._look_at_gates(rows, choice)
            return choice, pool, None
        if self._since_look < LOOK_EVERY_STEPS and not choice.passes[self._kv.models].any():
            return choice, pool, None
        self._since_look = 0
        whole = choose(pool._replace(paths=paths))
        self._look_at_gates(rows, whole)
        without = choose(pool._replace(paths=np.where(self._kv.models[:, None, None], 0.0, paths)))
        costs = pool.price.rate * self._evidence.latency.feeding_s(batch.missing[:, rows], float(len(rows)))
        closing = self._kv.closing(batch, rows, whole, choice, without, costs)
        after = choose(_served(pool, paths, closing > 0)) if closing.any() else choice
        if not closing.any() or not self._kv.pays(batch, rows, closing, costs, after.value - choice.value):
            return choice, pool, None
        at_once = (closing > 0) & (closing >= batch.missing[:, rows])
        pool = _served(pool, paths, at_once)
        return (after if at_once.sum() == np.count_nonzero(closing) else choose(pool)), pool, closing

    def _look_at_gates(self, rows: Ints, choice: Choice) -> None:
        if len(rows) and not choice.for_slo and not self._evidence.probes.off:
            self._kv.look(choice.passes)

    def _new_block(self, batch: Batch, rows: Ints, pool: Pool, choice: Choice) -> Block | None:
        """Start to explore: a drafter that is hardly known at once; else, every so often, the one with the highest
        upper bound, where that beats the choice or nothing is chosen."""
        acceptance, explorer = self._evidence.acceptance, self._evidence.explorer
        strangers = not all(acceptance.met.tolist()) and bool((self.force.usable & ~acceptance.met).any())
        if not explorer.due(eager=strangers) or choice.for_slo or not len(rows):
            return None
        unknown = self.force.usable & ~acceptance.met
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
        self, batch: Batch, rows: Ints, choice: Choice, purpose: Purpose, closing: Ints | None = None,
        widths: Ints | None = None,
    ) -> DraftPlan:  # fmt: skip
        """widths: (D,); None: chains."""
        closes = np.zeros(batch.missing.shape, np.int64)
        if closing is not None:
            closes[:, rows] = closing
        asked = _spread(choice.asked, rows, len(batch))
        widths = np.ones_like(choice.passes) if widths is None else widths
        return DraftPlan(choice.passes, widths, asked, self._feed(batch, choice.passes, closes), purpose)

    def _nobody_runs(self, batch: Batch) -> DraftPlan:
        """Whatever `draftPrefill` says: who is switched off must not be run."""
        passes = np.zeros(len(self._drafters), np.int64)
        asked = np.full((1, len(batch)), NOBODY)
        return DraftPlan(passes, np.ones_like(passes), asked, np.zeros_like(batch.missing), Purpose.FIXED)

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
        feed = self._feed(batch, passes, closes)
        if purpose is Purpose.FIXED:  # nobody weighs it, so a long prompt is read chunk by chunk
            feed[drafter] = np.where(batch.prompt > 0, batch.missing[drafter], feed[drafter])
        return DraftPlan(passes, widths, asked, feed, purpose)

    def _feed(self, batch: Batch, passes: Ints, closing: Ints) -> Ints:
        always = self.force.hot.draft_prefill is DraftPrefill.ALWAYS
        return self._kv.feed(batch, passes, closing, self.force.usable, always=always)

    @property
    def _limit(self) -> int:
        """Most draft tokens at present. Without a profile one more than was tried: further would be extrapolation."""
        evidence = self._evidence
        most = self.force.most_tokens
        return min(most, evidence.longest + 1) if evidence.latency.learning else most

    def _nothing(self, requests: int) -> Choice:
        return nobody(len(self._drafters), requests, 0.0)


def _served(pool: Pool, paths: Floats, more: Bools) -> Pool:
    """The pool with `more` (D, N) requests that its drafters can serve; paths: as if no cache had a hole."""
    return pool._replace(paths=np.where((pool.paths > 0) | more[:, :, None], paths, 0.0))


@compiled
def _can_ask(prompt_left: Ints, left: Ints) -> Ints:
    """Rows of the requests that decode in the next step and have tokens left for proposals."""
    rows, count = np.empty(len(left), np.int64), 0
    for i in range(len(left)):
        if prompt_left[i] == 0 and left[i] > OF_THIS_STEP:
            rows[count] = i
            count += 1
    return rows[:count]


@compiled
def _spread(asked: Ints, rows: Ints, requests: int) -> Ints:
    """(2, N): `asked` (2, n) of `rows` (n,); all others ask nobody."""
    every = np.full((2, requests), NOBODY)
    for n in range(len(rows)):
        every[0, rows[n]], every[1, rows[n]] = asked[0, n], asked[1, n]
    return every
