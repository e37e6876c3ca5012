"""The entry point: two decisions a step, and what came of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import (
    Batch,
    DraftPlan,
    ExecutionMode,
    Purpose,
    RequestView,
    StepOutcome,
    VerifyPlan,
)
from outrider_runtime.control.choice import best_lengths
from outrider_runtime.control.costs import LatencyModel, Shape
from outrider_runtime.control.counters import ControllerSnapshot, DrafterCounters, Reason
from outrider_runtime.control.decision import NOBODY, DraftChoice, DraftProblem, choose_draft
from outrider_runtime.control.explore import Block, Explorer, upper_bounds
from outrider_runtime.control.gate import DraftGate
from outrider_runtime.control.goodput import Goodput
from outrider_runtime.control.latency import OnlineLatency
from outrider_runtime.control.problem import Step, draft_problem, next_step, this_step, verification_gains
from outrider_runtime.control.settings import DraftPrefill, HotSettings, Mode, Settings
from outrider_runtime.control.tally import Tally
from outrider_runtime.control.truth import Truth

LONGEST_STEP_S = 120.0
LEAST_STEPS = 20
"""Before so many steps nothing is said about the worth of speculation."""
IDLE_S = 10.0
"""No step for so long means no traffic."""
MANY_REQUESTS = 32
KEEP_STEPS_MANY, KEEP_STEPS_FEW = 3, 1
"""How many steps repeat a choice of drafters and draft length while the same requests decode."""
CHECK_GATE_EVERY = 8
"""Decisions between two looks at what the neural draft would bring to requests whose draft KV has holes."""


class Controller:
    """One per engine. Not thread-safe: call it from the scheduler's thread, `snapshot` and `configure` included
    (another thread hands its change over and the scheduler applies it between two steps)."""

    def __init__(
        self,
        settings: Settings,
        latency: LatencyModel | None,
        *,
        clock: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        """`latency` None: learn every cost from the engine's own steps. `clock` times the decisions themselves
        (time.perf_counter); all other times come in with `Batch.now` and `StepOutcome.now`. `rng` spreads probes and
        exploration, so that they do not fall into step with periodic traffic."""
        self.settings = settings
        self._hot = settings.hot
        self._clock = clock
        self._names = [drafter.name for drafter in settings.drafters]
        self._acceptance = Acceptance(self._names, settings.max_draft_tokens)
        self._latency = OnlineLatency(latency, settings.drafters, settings.largest_graph_tokens)
        self._goodput = Goodput()
        self._gate = DraftGate()
        self._truth = Truth(rng)
        self._explorer = Explorer(rng)
        self._tally = Tally(self._names, settings.max_draft_tokens)
        self._suspended: dict[str, str] = {}
        self._usable = self._who_is_usable()
        self._pin: tuple[int, str | None] | None = None
        self._purpose = Purpose.FIXED
        self._neural_proposes = False
        self._kept: DraftPlan | None = None
        self._kept_for: dict[str | None, str | None] = {}
        self._since_choice = 0
        self._looks = 0
        self._decision_s = 0.0
        self._gated = False
        self._longest = 1

    # -- the two decisions -------------------------------------------------------------------------------------

    def plan_verify(self, batch: Batch) -> VerifyPlan:
        """Verification lengths for the proposals that wait; call before the engine schedules the step."""
        started = self._clock()
        lengths = [0] * len(batch.requests)
        if any(view.proposed > 0 for view in batch.requests) and not self._silent:
            step = this_step(batch, self._latency, self._goodput)
            for position, length in zip(step.positions, self._verification(step).tolist(), strict=True):
                lengths[position] = length
        self._decision_s += self._clock() - started
        return VerifyPlan(tuple(lengths), self._purpose)

    def plan_draft(self, batch: Batch) -> DraftPlan:
        """What to propose at the end of the step that the engine has just scheduled."""
        started = self._clock()
        self._acceptance.age(batch.now)
        plan = self._fixed_plan(batch) or self._closed_loop_plan(batch)
        self._purpose = plan.purpose
        self._neural_proposes = plan.neural_tokens > 0
        self._decision_s += self._clock() - started
        return plan

    def _verification(self, step: Step) -> NDArray[np.int64]:
        """(N,): lengths for the decoding requests of `step`."""
        gains = verification_gains(step, self._acceptance, self.settings.max_draft_tokens)
        if self._purpose is Purpose.CHOICE:
            costs = step.query_costs_s + self._next_pass_token_s()
            return best_lengths(gains, costs, step.price, step.rate, step.budget).lengths
        # Exploring, pinned or static: everything that was proposed, as far as it fits.
        return _fitting((gains > 0).sum(axis=0), step.budget)

    def _next_pass_token_s(self) -> float:
        """What a verified token costs in the neural draft's next first pass, if that goes on as it did."""
        neural = self.settings.neural
        return self._latency.draft_token_s(neural.name) if neural is not None and self._neural_proposes else 0.0

    def _fixed_plan(self, batch: Batch) -> DraftPlan | None:
        """The plan where nothing is to be chosen: a pin, Static, Off, or no drafter that can run."""
        if self._pin is not None:
            return self._plan_for_one(batch, *self._pin, Purpose.FIXED)
        usable = self._usable
        if self._silent or not usable.any():
            return self._plan_for_one(batch, 0, None, Purpose.FIXED)
        if self._hot.mode is Mode.STATIC:
            return self._plan_for_one(batch, self._limit, self._names[int(usable.argmax())], Purpose.FIXED)
        return None

    def _closed_loop_plan(self, batch: Batch) -> DraftPlan:
        kept = self._kept_plan(batch)
        if kept is not None:
            return kept
        step = next_step(batch, self._latency, self._goodput)
        problem = self._problem(step, assume_ready=False)
        choice = choose_draft(problem)
        passed, self._since_choice = 1 + self._since_choice, 0
        self._update_gate(step, problem, choice)
        block = self._explorer.step(passed) or self._new_block(problem, choice)
        speculating = choice.draft_tokens > 0 and not self._truth.off
        prefill = any(step.now.prefill_tokens)
        self._kept = None
        if self._truth.next_is_probe(len(batch.requests), passed, speculating=speculating, prefill=prefill):
            return self._plan(batch, step, _nothing(choice), Purpose.PROBE)
        if block is not None:
            if not self._explorer.running:
                self._gate.shut()
            return self._plan_for_one(batch, block.draft_tokens, self._names[block.drafter], Purpose.EXPLORE)
        if self._gate.window and not speculating:
            return self._plan(batch, step, _nothing(choice), Purpose.EXPLORE)
        self._kept = self._plan(batch, step, choice if speculating else _nothing(choice), Purpose.CHOICE)
        self._kept_for = dict(zip(step.now.id, self._kept.drafters, strict=True))
        return self._kept

    def _kept_plan(self, batch: Batch) -> DraftPlan | None:
        """The last choice once more: one step hardly changes what is known, the less the larger the batch is.

        Verification lengths are chosen anew at every step all the same.
        """
        kept = self._kept
        most = KEEP_STEPS_MANY if len(batch.requests) >= MANY_REQUESTS else KEEP_STEPS_FEW
        if kept is None or self._since_choice >= most:
            return None
        for view in batch.requests:
            drafter = self._kept_for.get(view.id, "")
            if drafter == "" or view.prefill_tokens or view.remaining_tokens <= self._limit + 2:
                return None
            if kept.neural_tokens and not view.draft_ready:
                return None
        drafters = tuple([self._kept_for[view.id] for view in batch.requests])
        if kept.draft_tokens > 0 and not any(drafters):
            return None
        self._since_choice += 1
        return kept if drafters == kept.drafters else dataclasses.replace(kept, drafters=drafters)

    def _plan(self, batch: Batch, step: Step, choice: DraftChoice, purpose: Purpose) -> DraftPlan:
        """`choice` for the engine. The neural draft also runs, proposing nothing, to keep its KV whole."""
        drafters: list[str | None] = [None] * len(batch.requests)
        for position, number in zip(step.positions, choice.drafters.tolist(), strict=True):
            drafters[position] = None if number == NOBODY else self._names[number]
        neural = self.settings.neural
        used = neural is not None and neural.name in drafters
        runs = used or self._keeps_draft_whole(batch)
        tokens = choice.draft_tokens
        return DraftPlan(tokens, tuple(drafters), runs, runs, tokens if used else 0, purpose)

    def _plan_for_one(self, batch: Batch, draft_tokens: int, drafter: str | None, purpose: Purpose) -> DraftPlan:
        """`draft_tokens` from one drafter for every request that it can serve."""
        neural = self.settings.neural
        is_neural = neural is not None and neural.name == drafter
        served = [
            drafter
            if view.prefill_left == 0 and view.remaining_tokens > 2 and (view.draft_ready or not is_neural)
            else None
            for view in batch.requests
        ]
        tokens = draft_tokens if any(served) else 0
        runs = is_neural and draft_tokens > 0
        if purpose is Purpose.EXPLORE:
            runs = runs or self._keeps_draft_whole(batch)
        drafters = tuple(served) if tokens else (None,) * len(served)
        return DraftPlan(tokens, drafters, runs, runs, tokens if is_neural else 0, purpose)

    def _keeps_draft_whole(self, batch: Batch) -> bool:
        neural = self.settings.neural
        if neural is None or neural.name in self._suspended or self._hot.draft_prefill is DraftPrefill.NEVER:
            return False
        if self._hot.draft_prefill is DraftPrefill.ALWAYS:
            return True
        if self._truth.off or self._gate.closed(len(batch.requests)):
            return False
        return any(view.draft_ready or view.prefill_tokens > 0 for view in batch.requests)

    def _update_gate(self, step: Step, problem: DraftProblem, choice: DraftChoice) -> None:
        """Tell the gate whether the neural draft would be used here if its KV were whole for every request."""
        neural, requests = problem.neural, len(step.now.id)
        self._gate.step()
        if neural == NOBODY or step.requests == 0 or not self._usable[neural]:
            return
        if self._gate.closed(requests) and any(step.now.prefill_tokens) and self._explorer.due():
            self._gate.let_through()
        if not problem.usable[neural].all():
            self._looks += 1
            if self._looks % CHECK_GATE_EVERY:
                return
            choice = choose_draft(self._problem(step, assume_ready=True))
        warming_up = not self._acceptance.met[neural] and not self._gate.closed(requests)
        if warming_up or self._truth.off:
            return  # the threshold is for load: neither a stranger nor the guard moves it
        self._gate.update(requests, worth=bool((choice.drafters == neural).any()))
        self._gated = requests >= self._gate.threshold

    def _problem(self, step: Step, *, assume_ready: bool) -> DraftProblem:
        drafters = self.settings.drafters
        return draft_problem(
            step, self._acceptance, self._latency, drafters, self._usable, self._limit,
            assume_ready=assume_ready,
        )  # fmt: skip

    def _new_block(self, problem: DraftProblem, choice: DraftChoice) -> Block | None:
        """Start to explore: a drafter that is hardly known at once; else, every so often, the one with the highest
        upper bound, where that beats the choice or nothing is chosen."""
        able = problem.usable.any(axis=1)
        unknown = able & ~self._acceptance.met
        if not able.any() or not self._explorer.due(eager=bool(unknown.any())):
            return None
        bounds = upper_bounds(problem, self._acceptance.upper_paths())
        bounds[unknown] = np.inf
        bounds[np.unique(choice.drafters[choice.drafters != NOBODY])] = -np.inf  # the choice tries these anyway
        drafter = problem.neural if self._gate.window else int(bounds.argmax())
        speculating = choice.draft_tokens > 0 and not self._truth.off
        if bounds[drafter] <= (choice.gain if speculating else -np.inf):
            self._explorer.postpone()
            return None
        self._explorer.start(drafter, int(problem.usable[drafter].sum()), self._limit)
        return self._explorer.step()

    # -- what came of it ---------------------------------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a finished step. Absurd times (NaN, negative, a suspended machine) are dropped and counted."""
        self._tally.observe(outcome)
        alarms = self._acceptance.alarms
        self._acceptance.observe(outcome.requests, outcome.now)
        if self._acceptance.alarms > alarms:
            self._truth.lift()
        if not self._observe_times(outcome):
            self._tally.dropped_steps += 1
            return
        self._tally.busy_s += outcome.step_s
        plain_rate = self._plain_rate(outcome)
        if outcome.prefill_tokens == 0:
            self._goodput.observe(outcome.tokens, outcome.step_s, plain_rate)
        self._explorer.observe(outcome, plain_rate)
        self._truth.observe(outcome)
        self._longest = max(self._longest, max((request.verified for request in outcome.requests), default=0))

    def _observe_times(self, outcome: StepOutcome) -> bool:
        """False when one of the step's times is absurd."""
        drafts_s = sum(outcome.draft_s.values())
        target_s = outcome.step_s - drafts_s if math.isnan(outcome.target_s) else outcome.target_s
        requests = outcome.n_requests
        shape = Shape(outcome.n_context, outcome.n_batched, requests, outcome.n_context_query)
        if not math.isfinite(outcome.step_s) or not 0 < outcome.step_s < LONGEST_STEP_S:
            return False
        plausible = self._latency.observe_target(shape, outcome.mode, target_s)
        for name, seconds in outcome.draft_s.items():
            passes = self._passes(outcome.draft_plan, name)
            plausible &= self._latency.observe_draft(name, shape, passes, seconds)
        return plausible

    def _passes(self, plan: DraftPlan, name: str) -> int:
        neural = self.settings.neural
        return max(1, plan.neural_tokens if neural is not None and neural.name == name else plan.draft_tokens)

    def _plain_rate(self, outcome: StepOutcome) -> float:
        """Modelled tokens per second of plain decoding at this step's batch."""
        requests = max(1, len(outcome.requests))
        shape = Shape(outcome.n_context, requests, requests, outcome.n_context / 1000)
        seconds = self._latency.target_s(shape, ExecutionMode.UNIFORM)
        return requests / seconds if seconds > 0 else 0.0

    # -- settings ----------------------------------------------------------------------------------------------

    def configure(self, hot: HotSettings) -> None:
        """Put new settings in force from the next decision on; what was learned stays."""
        self._hot = hot
        self._usable = self._who_is_usable()
        self._kept = None

    def replace_latency(self, latency: LatencyModel | None) -> None:
        """A profile was loaded or changed; online corrections start anew."""
        self._latency = OnlineLatency(latency, self.settings.drafters, self.settings.largest_graph_tokens)
        self._kept = None

    def forget(self, request_id: str) -> None:
        """The request has finished or was aborted; unknown ids are fine."""
        self._acceptance.forget(request_id)

    def suspend(self, drafter: str, reason: str) -> None:
        """Use this drafter no more (it failed to load, raised, proposed nonsense); `resume` lifts it."""
        self._known(drafter)
        self._suspended[drafter] = reason
        self._kept = None
        self._usable = self._who_is_usable()

    def resume(self, drafter: str) -> None:
        """Lift a suspension; evidence from before it has aged meanwhile."""
        self._suspended.pop(drafter, None)
        self._usable = self._who_is_usable()

    def pin(self, draft_tokens: int | None, drafter: str | None = None) -> None:
        """Hold K and the drafter (profiler, benchmarks); None for `draft_tokens` releases the pin.

        Pinned to 0 the neural draft does not run at all. Raises ValueError for an unknown drafter or a length that
        the engine was not built for.
        """
        if draft_tokens is None:
            self._pin = None
            return
        if not 0 <= draft_tokens <= self.settings.max_draft_tokens:
            raise ValueError(f"pin: {draft_tokens} draft tokens; the engine takes 0..{self.settings.max_draft_tokens}")
        if draft_tokens > 0:
            self._known(drafter)
        self._pin = (draft_tokens, drafter)

    def snapshot(self, now: float | None = None) -> ControllerSnapshot:
        """Everything the state endpoint tells about the loop. `now`, if given, tells an idle engine from a busy one."""
        tally = self._tally
        return ControllerSnapshot(
            reason=self._reason(now),
            drafter=tally.favourite,
            draft_tokens=tally.recent_length,
            gated=self._gated,
            running=tally.running,
            learning=self._latency.learning,
            goodput_tokens_per_s=self._goodput.tokens_per_s,
            steps=tally.steps,
            speculative_steps=tally.speculative_steps,
            output_tokens=tally.output_tokens,
            busy_s=tally.busy_s,
            proposed_tokens=tally.proposed_tokens,
            draft_length_steps=tuple(tally.draft_length_steps),
            dropped_steps=tally.dropped_steps,
            decision_s=self._decision_s,
            drafters={name: self._drafter_counters(name) for name in self._names},
            speedup=self._truth.counters,
        )

    def _drafter_counters(self, name: str) -> DrafterCounters:
        number = self._acceptance.index[name]
        return dataclasses.replace(
            self._tally.drafter(name),
            suspended=self._suspended.get(name, ""),
            hazards=tuple(self._acceptance.hazards[number].tolist()),
            hit_rate=float(self._acceptance.hit_rates[number, 0]),
        )

    def _reason(self, now: float | None) -> Reason:
        tally = self._tally
        if self._silent:
            return Reason.OFF
        if not self._usable.any():
            return Reason.NO_DRAFTER
        if tally.steps == 0 or (now is not None and now - tally.last_step_at > IDLE_S):
            return Reason.NO_TRAFFIC
        if tally.recent_speculation < 0.5:
            return Reason.NOT_WORTH_IT if tally.steps >= LEAST_STEPS else Reason.MEASURING
        measured = self._truth.counters.probes > 0 or self._hot.mode is Mode.STATIC
        return Reason.PAYS if measured else Reason.MEASURING

    @property
    def _silent(self) -> bool:
        return self._pin is None and (self._hot.mode is Mode.OFF or self._limit == 0)

    @property
    def _limit(self) -> int:
        """Most draft tokens at present. Without a profile one more than was tried: further would be extrapolation."""
        limit = max(0, min(self.settings.max_draft_tokens, self._hot.max_draft_tokens))
        if self._latency.learning and self._hot.mode is Mode.CLOSED_LOOP:
            limit = min(limit, self._longest + 1)
        return limit

    def _who_is_usable(self) -> NDArray[np.bool_]:
        """(D,): drafters that may run at all."""
        never = self._hot.draft_prefill is DraftPrefill.NEVER
        return np.array(
            [spec.name not in self._suspended and not (spec.neural and never) for spec in self.settings.drafters],
            dtype=bool,
        )

    def _known(self, drafter: str | None) -> None:
        if drafter not in self._names:
            raise ValueError(f"drafter {drafter!r} is not in the pool {self._names}")


def _decodes_on(view: RequestView) -> bool:
    """It decodes in the next step, and a proposal of one token would still fit."""
    return view.prefill_left == 0 and view.remaining_tokens > 2


def _nothing(choice: DraftChoice) -> DraftChoice:
    return DraftChoice(0, np.full(len(choice.drafters), NOBODY), choice.plain_value, choice.plain_value)


def _fitting(lengths: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """As much of `lengths` as the budget holds, from the first request on."""
    before = np.cumsum(lengths) - lengths
    return np.clip(budget - before, 0, lengths)
