"""The entry point: two decisions a step, and what came of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from outrider_runtime.control.acceptance import OF_THIS_STEP
from outrider_runtime.control.admission import Pace, admissions, token_budget
from outrider_runtime.control.batch import NOBODY, Batch, Bools, Floats, Ints
from outrider_runtime.control.cost import LatencyModel, Shape, next_step, this_step, without_prompts
from outrider_runtime.control.draft_kv import SHORT_TOKENS, DraftKV, Room
from outrider_runtime.control.drafters import Choice, Need, Pool, choose, nobody
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.explore import Block, upper_bounds
from outrider_runtime.control.forest import Forest
from outrider_runtime.control.plans import DraftPlan, Outcome, Purpose, VerifyPlan
from outrider_runtime.control.select import everything, select
from outrider_runtime.control.settings import DraftPrefill, HotSettings, Mode, Settings, Verification
from outrider_runtime.control.slo import MOST_LOSS, anyone_late, clocks, forced_nodes, is_crowd
from outrider_runtime.control.state import (
    ACCEPTED,
    IDLE_S,
    LEAST_STEPS,
    REQUEST_STEPS,
    TRIED,
    VERIFIED,
    DrafterState,
    Reason,
    State,
    Weighed,
)
from outrider_runtime.control.value import Price

LOOK_EVERY_STEPS = 8
"""Steps between two looks at what draft models would bring to requests whose caches have holes."""
MARGIN_ERRORS = 1.0
"""Standard errors of the model by which a choice must beat k = 0."""


class Controller:
    """One per engine. Not thread-safe: whoever calls it from several threads holds a lock (`loop.ControlLoop.lock`)."""

    def __init__(
        self,
        settings: Settings,
        latency: LatencyModel | None,
        *,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        """`latency` None: learn every cost from the engine's own steps. `clock` times the decisions themselves
        (time.perf_counter); all other times come in with `Batch.now` and `Outcome.now`. `rng` spreads probes and
        exploration, so that they do not fall into step with periodic traffic."""
        self.settings = settings
        self._clock = clock
        self._evidence = Evidence(settings, latency, rng)
        self._kv = DraftKV(settings, rng)
        self._suspended: dict[int, str] = {}
        self._pinned: tuple[int, int] | None = None
        self._expected = np.zeros(settings.slots)
        """(S,): tokens that the step under way is expected to give beyond the bonus token; only where classes ask."""
        self._drafts_s = 0.0
        """Seconds of the drafts at the end of a step, if they go on as they did."""
        self._since_look = 0
        self._gated = False
        self._decision_s = 0.0
        self._settle()

    # -- what an engine calls at every step ---------------------------------------------------------------------

    def plan_verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        """What the target scores of the proposals that wait; call before the engine schedules the step."""
        started = self._clock()
        plan = self._verify(batch, forest)
        self._decision_s += self._clock() - started
        return plan

    def plan_draft(self, batch: Batch) -> DraftPlan:
        """What to propose at the end of the step that the engine has just scheduled."""
        started = self._clock()
        self._evidence.acceptance.age(batch.now)
        plan = self._fixed_plan(batch) or self._closed_loop_plan(batch)
        self._decision_s += self._clock() - started
        return plan

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished step. Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        started = self._clock()
        self._evidence.observe(outcome)
        self._decision_s += self._clock() - started

    def release(self, slots: Ints) -> None:
        """The requests in these slots have ended; call after their last `observe`."""
        self._evidence.acceptance.release(slots)
        self._expected[slots] = 0.0

    # -- what changes while serving -----------------------------------------------------------------------------

    def configure(self, hot: HotSettings) -> None:
        """Put new settings in force from the next decision on; what was learned stays."""
        if [one.name for one in hot.slo_classes] != [one.name for one in self.settings.hot.slo_classes]:
            self._evidence.acceptance.set_classes(len(hot.slo_classes))
        self.settings = dataclasses.replace(self.settings, hot=hot)
        self._settle()

    def replace_latency(self, latency: LatencyModel | None) -> None:
        """A profile was loaded or changed; online corrections start anew. None: learn every cost."""
        self._evidence.replace_latency(latency)

    def suspend(self, drafter: str, reason: str) -> None:
        """It does not run until `resume`. Raises ValueError for a drafter that is not in the pool."""
        self._suspended[self._number(drafter)] = reason
        self._settle()

    def resume(self, drafter: str) -> None:
        self._suspended.pop(self._number(drafter), None)
        self._settle()

    def pin(self, draft_tokens: int | None, drafter: str | None = None) -> None:
        """Every request is proposed so many tokens by one drafter, all of them verified; None: choose again.

        Raises ValueError for an unknown drafter, or a length that the engine was not built for.
        """
        if draft_tokens is None:
            self._pinned = None
        elif not 0 <= draft_tokens <= self.settings.max_draft_tokens:
            raise ValueError(f"pin: {draft_tokens} draft tokens; the engine takes 0..{self.settings.max_draft_tokens}")
        else:
            self._pinned = (draft_tokens, self._number(drafter) if draft_tokens else NOBODY)
        self._settle()

    def state(self, now: float | None = None) -> State:
        """`now`, if given, tells an idle engine from a busy one."""
        evidence = self._evidence
        drafters = {drafter.name: self._drafter_state(d) for d, drafter in enumerate(self.settings.drafters)}
        return State(
            self._reason(now), evidence.latency.learning, self._gated, evidence.goodput.tokens_per_s,
            evidence.probes.speedup, evidence.probes.counts, evidence.tally, self._decision_s, drafters,
        )  # fmt: skip

    def _drafter_state(self, drafter: int) -> DrafterState:
        acceptance, counted = self._evidence.acceptance, self._evidence.tally.of_drafter[drafter].tolist()
        hazards = tuple(acceptance.hazards[drafter, :, -1].tolist())
        return DrafterState(
            self._suspended.get(drafter, ""), counted[REQUEST_STEPS], counted[TRIED], counted[VERIFIED],
            counted[ACCEPTED], hazards, float(acceptance.hit_rates[drafter, 0]),
        )  # fmt: skip

    def weighed(self, batch: Batch) -> Weighed | None:
        """What decides about `batch`, as given to `plan_draft`; None where nobody can be drafted for."""
        rows = np.flatnonzero((batch.prompt_left == 0) & (batch.left > OF_THIS_STEP))
        if not len(rows):
            return None
        base = next_step(batch)
        paths, offers = self._evidence.acceptance.paths(batch, rows, self._usable, max(1, self._limit))
        price = self._price(base, batch.context[rows], 0.0, 1)
        brings = (paths * offers)[:, :, 0].mean(axis=1)
        draft_s = self._draft_seconds(without_prompts(base))[0]
        return Weighed(price.token_s, price.rate, tuple(brings.tolist()), tuple(draft_s.tolist()))

    # -- what is verified ---------------------------------------------------------------------------------------

    def _verify(self, batch: Batch, forest: Forest) -> VerifyPlan:
        proposals = len(forest) > 0 and not self._silent
        admits = self._has_classes and self.settings.hot.admission
        admits = admits and (batch.next is not None or bool(batch.prompt.any()))
        if not proposals and not admits:
            return VerifyPlan(np.zeros(len(forest), dtype=bool), np.zeros(len(batch), np.int64), forest.purpose)
        base = this_step(batch)
        decoding = round(base.n_batched - base.n_prompt)
        budget = max(0, min(batch.token_budget - decoding, batch.free_kv_tokens - round(base.n_batched)))
        nodes: Bools = np.zeros(len(forest), dtype=bool)
        paths: Floats = np.zeros(len(forest))
        purpose = forest.purpose
        if proposals and purpose not in (Purpose.CHOICE, Purpose.SLO):
            nodes = everything(forest, batch.left, budget)
        elif proposals:
            paths = self._evidence.acceptance.node_paths(batch, forest)
            nodes, purpose = self._select(batch, forest, paths, base, budget)
        plan = VerifyPlan(nodes, np.bincount(forest.request[nodes], minlength=len(batch)), purpose)
        if not self._has_classes:
            return plan
        gained = np.bincount(forest.request, weights=paths * nodes, minlength=len(batch)).astype(float)
        self._expected[batch.slot] = gained
        return self._hold_back(plan, batch, base, gained) if admits else plan

    def _select(
        self, batch: Batch, forest: Forest, paths: Floats, base: Shape, budget: int
    ) -> tuple[Bools, Purpose]:  # fmt: skip
        alone, most = without_prompts(base), min(budget, len(forest))
        reads_s = float(self._draft_seconds(alone)[2][forest.lengths > 0].sum())
        price = self._price(base, batch.context, reads_s, most)
        varlen = self.settings.verification is Verification.VARLEN
        request, depth = forest.request, forest.depth
        best = select(paths, request, depth, price, budget, varlen=varlen)
        if not self._has_classes:
            return best.nodes, forest.purpose
        price = self._price(alone, batch.context, reads_s, most) if base.n_prompt else price
        step_s = price.step_s(int(best.nodes.sum())) + self._drafts_s
        if not anyone_late(batch.slo_class, batch.elapsed_s, batch.emitted, self._tpots_s, step_s):
            return best.nodes, forest.purpose
        state = clocks(batch, np.arange(len(batch)), self._tpots_s)
        who = state.behind(step_s, 1.0 + np.bincount(request, weights=paths, minlength=len(batch)))
        if not who.any():
            return best.nodes, forest.purpose
        forced = forced_nodes(paths, request, who, state.needed(step_s), step_s, price, budget)
        gained = 1.0 + np.bincount(request, weights=paths * forced, minlength=len(batch))
        longest_s = state.longest_step_s(gained, price.step_s(int(forced.sum())) + self._drafts_s) - self._drafts_s
        paced = select(paths, request, depth, price, budget, forced=forced, longest_s=longest_s, varlen=varlen)
        if is_crowd(who):
            free = select(paths, request, depth, price, budget, varlen=varlen)
            if free.value - paced.value > MOST_LOSS * price.rate * step_s:
                return best.nodes, forest.purpose
        return paced.nodes, Purpose.SLO

    def _hold_back(self, plan: VerifyPlan, batch: Batch, base: Shape, gained: Floats) -> VerifyPlan:
        """The plan with as many prompts and new requests as the running classes bear."""
        rows, alone = np.flatnonzero(batch.decodes), without_prompts(base)
        state = clocks(batch, rows, self._tpots_s)
        pace = Pace(state, alone, int(plan.lengths.sum()), 1.0 + gained[rows], self._drafts_s)
        reads_s = float(self._draft_seconds(alone)[2].sum()) if self._drafts_s else 0.0
        latency = self._evidence.latency
        return dataclasses.replace(
            plan, token_budget=token_budget(batch, pace, latency, reads_s),
            admit=admissions(batch, pace, latency, self._tpots_s),
        )  # fmt: skip

    # -- what is proposed ---------------------------------------------------------------------------------------

    def _fixed_plan(self, batch: Batch) -> DraftPlan | None:
        """The plan where nothing is to be chosen: nobody can be asked, a pin, or Static."""
        if self._pinned is not None and self._pinned[0] > 0 and self._usable[self._pinned[1]]:
            return self._plan_for_one(batch, *self._pinned, Purpose.FIXED)
        if self._pinned is not None or self._silent or not self._usable.any():
            return self._nobody_runs(batch)
        if self.settings.hot.mode is Mode.STATIC:
            first = int(self._usable.argmax())
            return self._plan_for_one(batch, self._most_tokens, first, Purpose.FIXED)
        return None

    def _closed_loop_plan(self, batch: Batch) -> DraftPlan:
        evidence = self._evidence
        rows = np.flatnonzero((batch.prompt_left == 0) & (batch.left > OF_THIS_STEP))
        base = next_step(batch)
        pool, paths = self._pool(batch, rows, base)
        choice = self._best(pool)
        choice, pool, closing = self._close_holes(batch, rows, pool, paths, choice)
        speculating = bool(choice.passes.any()) and not evidence.probes.off
        block = evidence.explorer.step() or self._new_block(batch, rows, pool, choice)
        probes = evidence.probes.next_is_probe(len(batch), speculating=speculating and not choice.for_slo)
        if probes:
            return self._plan(batch, rows, self._nothing(len(rows)), Purpose.PROBE)
        block = block if block is not None and self._usable[block.drafter] else None
        if block is not None and speculating and not self._has_passes[block.drafter]:
            return self._plan(batch, rows, self._asked_first(choice, block.drafter), Purpose.EXPLORE, closing)
        if block is not None:
            return self._plan_for_one(batch, block.draft_tokens, block.drafter, Purpose.EXPLORE)
        if not speculating:
            choice = self._nothing(len(rows))  # holes are closed all the same, step by step where they are long
        purpose = Purpose.SLO if choice.for_slo else Purpose.CHOICE
        plan = self._plan(batch, rows, choice, purpose, closing)
        if self._has_classes:
            self._drafts_s = float(
                ((pool.first_s + np.maximum(0, plan.passes - 1) * pool.pass_s) * (plan.passes > 0)).sum()
            )
        return plan

    def _best(self, pool: Pool) -> Choice:
        """The best choice; where most of the batch is behind, only if that does not cost too much of its goodput."""
        margin = MARGIN_ERRORS * pool.price.rate * pool.price.error_s
        choice = choose(pool, margin=margin)
        if not choice.for_slo or pool.need is None or not is_crowd(pool.need.behind):
            return choice
        free = choose(pool._replace(need=None), margin=margin)
        return choice if free.value - choice.value <= -MOST_LOSS * choice.plain_value else free

    def _pool(self, batch: Batch, rows: Ints, base: Shape) -> tuple[Pool, Floats]:
        """What the drafters offer for the next step, and its paths as if no cache had a hole."""
        limit, alone = self._limit, without_prompts(base)
        paths, offers = self._evidence.acceptance.paths(batch, rows, self._usable, limit)
        budget = min(batch.token_budget - len(rows), batch.free_kv_tokens - 2 * round(base.n_batched))
        price = self._price(base, batch.context[rows], 0.0, max(0, min(budget, len(rows) * limit)))
        prompts = float(batch.prompt.sum()) if self.settings.whole_batch else 0.0
        pool = Pool(
            paths, offers, self._has_passes, *self._draft_seconds(alone, prompts), price,
            self._tiers if limit == self._most_tokens else self._tiers[self._tiers <= limit], max(0, budget),
            self.settings.verification is Verification.VARLEN,
            self._need(batch, rows, paths, price) if self._has_classes else None,
        )  # fmt: skip
        if not self._kv.any_kv:
            return pool, paths
        holes = self._kv.holes(batch, rows)
        return pool._replace(paths=np.where(holes[:, :, None], 0.0, paths)), paths

    def _need(self, batch: Batch, rows: Ints, paths: Floats, price: Price) -> Need | None:
        """Who will be behind when the next step begins; None for nobody."""
        step_s = price.plain_s + self._drafts_s  # the step under way is taken to be like a plain one
        if not anyone_late(batch.slo_class, batch.elapsed_s, batch.emitted, self._tpots_s, 2 * step_s):
            return None
        state = clocks(batch, rows, self._tpots_s).later(step_s, 1.0 + self._expected[batch.slot[rows]])
        behind = state.behind(step_s, 1.0 + paths.sum(axis=2).max(axis=0))
        return Need(behind, state.needed(0.0) - 1.0, 1.0 / state.tpot_s) if behind.any() else None

    def _close_holes(
        self, batch: Batch, rows: Ints, pool: Pool, paths: Floats, choice: Choice
    ) -> tuple[Choice, Pool, Ints]:
        """The choice after those holes in draft models' caches are closed that it pays to close. Gates look at what
        would be chosen if no cache had a hole."""
        closing = np.zeros((len(pool.passes), len(rows)), np.int64)
        self._since_look += 1
        if not self._kv.any_kv or self._evidence.probes.off or not (self._kv.holes(batch, rows)).any():
            self._look_at_gates(batch, choice)
            return choice, pool, closing
        if self._since_look < LOOK_EVERY_STEPS and not choice.passes.any():
            return choice, pool, closing
        self._since_look = 0
        closed = np.array([gate.closed(len(batch)) for gate in self._kv.gates])
        whole = self._best(pool._replace(paths=np.where(closed[:, None, None], pool.paths, paths)))
        self._look_at_gates(batch, whole)
        room = Room(batch.token_budget, self._spare_s(batch, rows, pool.price))
        closing = self._kv.closing(batch, rows, whole, choice, pool.token_s, pool.price.rate, room)
        fed = closing >= batch.missing[:, rows]
        served = (pool.paths > 0) | ((closing > 0) & fed)[:, :, None]
        pool = pool._replace(paths=np.where(served, paths, 0.0))
        return (self._best(pool) if closing.any() else choice), pool, closing

    def _spare_s(self, batch: Batch, rows: Ints, price: Price) -> float:
        """Seconds by which the step may be lengthened so that no TPOT is lost that can still be kept."""
        if not self._has_classes:
            return math.inf
        state = clocks(batch, rows, self._tpots_s)
        slack_s = state.slack_s(price.plain_s + self._drafts_s, 1.0 + self._expected[batch.slot[rows]])
        return float(slack_s[slack_s >= 0].min(initial=math.inf))

    def _look_at_gates(self, batch: Batch, choice: Choice) -> None:
        if choice.for_slo or self._evidence.probes.off:
            return
        self._gated = False
        for gate, passes, reads in zip(self._kv.gates, choice.passes.tolist(), self._reads_now, strict=True):
            if reads:
                gate.look(len(batch), wanted=passes > 0)
                self._gated |= gate.closed(len(batch))

    def _new_block(self, batch: Batch, rows: Ints, pool: Pool, choice: Choice) -> Block | None:
        """Start to explore: a drafter that is hardly known at once; else, every so often, the one with the highest
        upper bound, where that beats the choice or nothing is chosen."""
        acceptance, explorer = self._evidence.acceptance, self._evidence.explorer
        unknown = self._usable & ~acceptance.met
        if not explorer.due(eager=bool(unknown.any())) or choice.for_slo or not len(rows):
            return None
        pool = pool._replace(paths=self._explorable(batch, rows, pool))
        speculating = bool(choice.passes.any()) and not self._evidence.probes.off
        # Where nothing is chosen, what was learned may be out of date: only costs say that there is nothing to find.
        paths = acceptance.upper_paths() if speculating else np.ones(acceptance.hazards.shape[:2])
        bounds = upper_bounds(pool, paths, self._limit)
        able = bounds > -np.inf
        bounds[unknown & able] = np.inf
        bounds[choice.passes > 0] = -np.inf  # the choice tries these anyway
        calls = np.flatnonzero(~self._has_passes & able & (choice.passes == 0))
        if speculating and len(calls) and not unknown.any():  # beside the choice it is worth more than alone
            return explorer.start(int(calls[0]), len(rows))
        drafter = int(bounds.argmax())
        if bounds[drafter] <= (choice.gain if speculating else 0.0):
            explorer.postpone()
            return None
        return explorer.start(drafter, int((pool.paths[drafter, :, 0] > 0).sum()))

    def _asked_first(self, choice: Choice, drafter: int) -> Choice:
        """The choice with a drafter of one call before whoever is asked: its worth beside the others is seen so."""
        passes = choice.passes.copy()
        passes[drafter] = self._limit
        asked = np.stack([np.full(choice.asked.shape[1], drafter), choice.asked[0]])
        return dataclasses.replace(choice, passes=passes, asked=asked)

    def _explorable(self, batch: Batch, rows: Ints, pool: Pool) -> Floats:
        """The pool's paths, with those of requests whose hole is small enough to be closed for a trial."""
        small = self._usable[:, None] & ~self._kv.holes(batch, rows, SHORT_TOKENS)  # (D, N)
        return np.where(small[:, :, None] & (pool.paths == 0.0), 1e-9, pool.paths)

    def _plan(
        self, batch: Batch, rows: Ints, choice: Choice, purpose: Purpose, closing: Ints | None = None
    ) -> DraftPlan:  # fmt: skip
        asked = np.full((2, len(batch)), NOBODY)
        asked[:, rows] = choice.asked
        closes = np.zeros(batch.missing.shape, np.int64)
        if closing is not None:
            closes[:, rows] = closing
        return DraftPlan(choice.passes, asked, self._feed(batch, choice.passes, closes), purpose)

    def _nobody_runs(self, batch: Batch) -> DraftPlan:
        """Whatever `draftPrefill` says: who is switched off must not be run."""
        passes = np.zeros(len(self.settings.drafters), np.int64)
        return DraftPlan(passes, np.full((1, len(batch)), NOBODY), np.zeros_like(batch.missing), Purpose.FIXED)

    def _plan_for_one(self, batch: Batch, draft_tokens: int, drafter: int, purpose: Purpose) -> DraftPlan:
        """`draft_tokens` from one drafter for every request that it can serve."""
        served = (batch.prompt_left == 0) & (batch.left > OF_THIS_STEP)
        closes = np.zeros(batch.missing.shape, np.int64)
        if self.settings.drafters[drafter].needs_kv:
            most = SHORT_TOKENS if purpose is Purpose.EXPLORE else batch.token_budget
            served &= batch.missing[drafter] <= most
            closes[drafter] = np.where(served, batch.missing[drafter], 0)
        passes = np.zeros(len(self.settings.drafters), np.int64)
        passes[drafter] = draft_tokens * served.any()
        asked = np.where(served & (passes[drafter] > 0), drafter, NOBODY)[None]
        feed = self._feed(batch, passes, closes)
        if purpose is Purpose.FIXED:  # nobody weighs it, so a long prompt is read chunk by chunk
            feed[drafter] = np.where(batch.prompt > 0, batch.missing[drafter], feed[drafter])
        return DraftPlan(passes, asked, feed, purpose)

    def _feed(self, batch: Batch, passes: Ints, closing: Ints) -> Ints:
        reads = np.zeros(len(passes), dtype=bool)
        if batch.prompt.any() and any(self._reads_now) and not self._silent:
            evidence, alone = self._evidence, Shape(0.0, float(len(batch)), float(len(batch)))
            token_s = self._draft_seconds(alone)[2]
            rate = evidence.goodput.rate(evidence.latency.plain_rate(alone))
            reads = self._kv.reads(batch, evidence.acceptance, self._usable, token_s, rate, self._most_tokens)
        feed = self._kv.feed(batch, passes, closing, reads)
        feed[~self._usable] = 0
        return feed

    # -- what both rest on --------------------------------------------------------------------------------------

    def _price(self, shape: Shape, context: Ints, token_s: float, most: int) -> Price:
        """token_s: what a verified token costs in the drafters' next first passes."""
        evidence = self._evidence
        node_s = evidence.latency.context_query_s * context / 1000 + token_s
        rate = evidence.goodput.rate(evidence.latency.plain_rate(without_prompts(shape)))
        return evidence.latency.price(shape, node_s, rate, most)

    def _draft_seconds(self, alone: Shape, prompts: float = 0.0) -> tuple[Floats, Floats, Floats]:
        """See `Latency.draft_columns`. What the first pass costs for verified tokens belongs to the choice of verifying
        them."""
        return self._evidence.latency.draft_columns(alone.n_context, alone.n_requests, prompts)

    @property
    def _limit(self) -> int:
        """Most draft tokens at present. Without a profile one more than was tried: further would be extrapolation."""
        evidence = self._evidence
        return min(self._most_tokens, evidence.longest + 1) if evidence.latency.learning else self._most_tokens

    def _nothing(self, requests: int) -> Choice:
        return nobody(len(self.settings.drafters), requests, 0.0)

    def _settle(self) -> None:
        """What follows from settings, suspensions and the pin."""
        hot, drafters = self.settings.hot, self.settings.drafters
        never = hot.draft_prefill is DraftPrefill.NEVER
        self._usable = np.array(
            [d not in self._suspended and not (drafter.reads and never) for d, drafter in enumerate(drafters)],
            dtype=bool,
        )
        self._has_passes = np.array([drafter.passes for drafter in drafters], dtype=bool)
        self._reads_now = [drafter.reads and self._usable[d] for d, drafter in enumerate(drafters)]
        self._most_tokens = max(0, min(self.settings.max_draft_tokens, hot.max_draft_tokens))
        tiers = self.settings.tiers or range(1, self._most_tokens + 1)
        self._tiers = np.array([tier for tier in tiers if tier <= self._most_tokens], np.int64)
        off = hot.mode is Mode.OFF or self._most_tokens == 0
        self._silent = off if self._pinned is None else self._pinned[0] == 0
        self._gated = False  # until a choice is made again
        self._has_classes = bool(hot.slo_classes) and self._pinned is None  # a pin measures the engine as it is
        self._tpots_s = np.array([*(one.tpot_s for one in hot.slo_classes), math.inf])
        self._kv.settings = self.settings

    def _number(self, drafter: str | None) -> int:
        names = [one.name for one in self.settings.drafters]
        if drafter not in names:
            raise ValueError(f"drafter {drafter!r} is not in the pool {names}")
        return names.index(drafter)

    def _reason(self, now: float | None) -> Reason:
        tally = self._evidence.tally
        if self._silent:
            return Reason.OFF
        if not self._usable.any():
            return Reason.NO_DRAFTER
        if tally.steps == 0 or (now is not None and now - tally.last_step_at > IDLE_S):
            return Reason.NO_TRAFFIC
        if tally.recent_speculation < 0.5:
            return Reason.NOT_WORTH_IT if tally.steps >= LEAST_STEPS else Reason.MEASURING
        measured = self._evidence.probes.counts.probes > 0 or self.settings.hot.mode is Mode.STATIC
        return Reason.PAYS if measured else Reason.MEASURING
