"""The planning half: from what is known to the two plans of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import OF_THIS_STEP, Batch, DraftPlan, Purpose, VerifyPlan
from outrider_runtime.control.catch_up import Room, holes_to_close
from outrider_runtime.control.choice import best_lengths
from outrider_runtime.control.decision import choose_draft
from outrider_runtime.control.drafting import NOBODY, DraftChoice, DraftProblem, nobody
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.explore import Block, upper_bounds
from outrider_runtime.control.kept import KeptChoice, Paying
from outrider_runtime.control.pacing import (
    admissions,
    anyone_late,
    drafts_s,
    lengths_for_slo,
    nobody_can_be_late,
    pressure,
    spare_s,
    token_budget,
)
from outrider_runtime.control.problem import Step, draft_problem, next_step, this_step, verification_gains
from outrider_runtime.control.roster import Roster
from outrider_runtime.control.settings import Mode
from outrider_runtime.control.upkeep import Upkeep

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

MOST_PATIENCE_USED = 1.0
"""Prompts are not held back for tight classes once one has waited for this share of what its own class bears: where
load stays high, prompts that give way would queue up without end."""
MOST_OF_A_BATCH = 3 / 4
"""What is chosen for so many is not owed to those who are about to end."""
LOOK_EVERY_STEPS = 8
"""Steps between two looks at what the neural draft would bring to requests whose draft KV has holes."""


class Whole(NamedTuple):
    """What would be, if no request's draft KV had a hole."""

    problem: DraftProblem
    choice: DraftChoice


class Planner:
    """Holds what one decision leaves for the next: the kept choice, the gate, the purpose of what is under way."""

    def __init__(self, roster: Roster, evidence: Evidence) -> None:
        self._roster = roster
        self._evidence = evidence
        self._upkeep = Upkeep(roster, evidence)
        self._last = DraftPlan(0, (), False, False, 0, Purpose.FIXED)
        self._drafts_s = 0.0
        """Seconds of the drafts at the end of a step, if they go on as they did; only where classes ask."""
        self._kept = KeptChoice()
        self._longest_s = 0.0
        """Seconds of a step under the kept choice, if all that it proposes is verified."""
        self._since_look = 0

    @property
    def gated(self) -> bool:
        """At the last look the batch was too large for the neural draft."""
        return self._upkeep.gated

    def rethink(self) -> None:
        """Something changed: the next decision keeps nothing of the last one."""
        self._kept.drop()

    # -- what is verified ---------------------------------------------------------------------------------------

    def verify(self, batch: Batch) -> VerifyPlan:
        proposals = any(view.proposed > 0 for view in batch.requests) and not self._roster.silent
        prompts = bool(self._roster.tpots_s) and (
            batch.next is not None or any(view.prefill_tokens for view in batch.requests)
        )
        if prompts and nobody_can_be_late(batch, self._evidence.latency, self._roster.tpots_s):
            prompts = False
        lengths = [0] * len(batch.requests)
        if not proposals and not prompts:
            return VerifyPlan(tuple(lengths), self._last.purpose)
        kept = None if prompts else self._kept_lengths(batch)
        if kept is not None:
            return VerifyPlan(kept, Purpose.CHOICE)
        evidence = self._evidence
        step = this_step(batch, evidence.latency, evidence.goodput)
        gains: Floats = np.zeros((1, step.requests))
        chosen, purpose = np.zeros(step.requests, dtype=int), self._last.purpose
        if proposals:
            gains = verification_gains(step, evidence.acceptance, self._roster.settings.max_draft_tokens)
            chosen, purpose = self._verification(step, gains)
        if step.requests == len(lengths):
            lengths = chosen.tolist()
        else:
            for position, length in zip(step.positions, chosen.tolist(), strict=True):
                lengths[position] = length
        plan = VerifyPlan(tuple(lengths), purpose)
        if prompts:
            budget, admit = self._prompts(batch, step, gains, chosen)
            return dataclasses.replace(plan, token_budget=budget, admit=admit)
        if purpose is Purpose.CHOICE:
            self._kept.verified(batch, plan.lengths)
        return plan

    def _kept_lengths(self, batch: Batch) -> tuple[int, ...] | None:
        """As the last choice saw it, while it is in force and nobody is late."""
        if self._last.purpose is not Purpose.CHOICE:
            return None
        tpots_s = self._roster.tpots_s
        lengths = self._kept.lengths(batch, self._evidence.acceptance.index)
        if lengths is None or not tpots_s:
            return lengths
        return None if anyone_late(batch.stands(), tpots_s, self._longest_s + self._drafts_s, 0) else lengths

    def _verification(self, step: Step, gains: Floats) -> tuple[Ints, Purpose]:
        """(N,): lengths for the decoding requests of `step`, and why."""
        purpose = self._last.purpose
        if purpose not in (Purpose.CHOICE, Purpose.SLO):
            # Exploring, pinned or static: everything that was proposed, as far as it fits.
            return _fitting((gains > 0).sum(axis=0), step.budget), purpose
        costs = step.query_costs_s + self._next_pass_token_s()
        best = best_lengths(gains, costs, step.price, step.rate, step.budget)
        tpots_s = self._roster.tpots_s
        paced = (
            lengths_for_slo(step, gains, costs, best, self._evidence.latency, tpots_s, self._drafts_s)
            if tpots_s
            else None
        )
        return (best.lengths, purpose) if paced is None else (paced.lengths, Purpose.SLO)

    def _prompts(self, batch: Batch, step: Step, gains: Floats, lengths: Ints) -> tuple[int | None, int | None]:
        """Token budget of the step, and how many waiting requests may start in it."""
        neural, latency, tpots_s = self._roster.neural, self._evidence.latency, self._roster.tpots_s
        gained = 1.0 + (gains * (np.arange(len(gains))[:, None] < lengths)).sum(axis=0)
        verified = int(lengths.sum())
        covers = neural is not None and self._last.run_neural
        budget = None
        if batch.patience_used < MOST_PATIENCE_USED:
            token_s = latency.draft_token_s(neural.name, batch.token_budget) if neural is not None and covers else 0.0
            budget = token_budget(
                batch, step, gained, verified, latency, tpots_s, draft_s=self._drafts_s, draft_token_s=token_s
            )
        return budget, admissions(batch, step, gained, verified, latency, tpots_s, self._drafts_s)

    def _next_pass_token_s(self) -> float:
        """What a verified token costs in the neural draft's next first pass, if that goes on as it did."""
        neural = self._roster.neural
        if neural is None or self._last.neural_tokens == 0:
            return 0.0
        return self._evidence.latency.draft_token_s(neural.name, len(self._last.drafters))

    # -- what is proposed ---------------------------------------------------------------------------------------

    def draft(self, batch: Batch) -> DraftPlan:
        holes = self._evidence.holes
        batch = batch if holes is None else holes.with_holes(batch)
        plan = self._fixed_plan(batch) or self._closed_loop_plan(batch)
        if self._roster.tpots_s and plan is not self._last:
            neural = self._roster.neural
            self._drafts_s = drafts_s(plan, neural.name if neural is not None else None, batch, self._evidence.latency)
        self._last = plan
        if holes is not None:
            holes.ran(batch.requests, neural=plan.run_neural)
        return plan

    def plain(self, names: Set[str]) -> DraftPlan | None:
        """`draft` for decoding requests to none of which anything is proposed once more, told by their names alone."""
        skips_prompts = self._upkeep.skips_prompts(len(names))
        plan = self._silent_plan(len(names)) or self._kept.nothing(names, skips_prompts=skips_prompts)
        if plan is None:
            return None
        self._last, self._drafts_s = plan, 0.0
        if self._evidence.holes is not None:
            self._evidence.holes.ran((), neural=False)
        return plan

    def _silent_plan(self, requests: int) -> DraftPlan | None:
        """The plan where nobody can be asked: a pin to 0, Off, or no drafter that can run."""
        roster, pinned = self._roster, self._roster.pinned
        nobody = pinned[0] == 0 if pinned is not None else roster.silent or not roster.anyone
        return DraftPlan(0, (None,) * requests, False, False, 0, Purpose.FIXED) if nobody else None

    def _fixed_plan(self, batch: Batch) -> DraftPlan | None:
        """The plan where nothing is to be chosen: nobody can be asked, a pin, or Static."""
        roster = self._roster
        silent = self._silent_plan(len(batch.requests))
        if silent is not None:
            return silent
        if roster.pinned is not None:
            return self._plan_for_one(batch, *roster.pinned, Purpose.FIXED)
        if roster.hot.mode is Mode.STATIC:
            first = roster.names[int(roster.usable.argmax())]
            return self._plan_for_one(batch, roster.most_tokens, first, Purpose.FIXED)
        return None

    def _closed_loop_plan(self, batch: Batch) -> DraftPlan:
        skips_prompts = self._upkeep.skips_prompts(len(batch.requests))
        return self._kept.plan(batch, skips_prompts=skips_prompts) or self._new_plan(batch)

    def _new_plan(self, batch: Batch) -> DraftPlan:
        self._evidence.settle(batch.now)
        self._upkeep.look(batch, self._limit)
        step, problem, choice = self._best(batch)
        passed = self._kept.passed()
        whole = self._choice_if_whole(step, problem, passed)
        self._upkeep.update(step, problem, choice, None if whole is None else whole.choice)
        self._kept.drop()
        return self._experiment(batch, step, problem, choice, passed) or self._chosen(batch, step, choice, whole)

    def _best(self, batch: Batch) -> tuple[Step, DraftProblem, DraftChoice]:
        step = next_step(batch, self._evidence.latency, self._evidence.goodput)
        problem = self._under_pressure(step, self._problem(step, assume_ready=False))
        return step, problem, choose_draft(problem)

    def _experiment(
        self, batch: Batch, step: Step, problem: DraftProblem, choice: DraftChoice, passed: int
    ) -> DraftPlan | None:
        """A probe's or a block's step, where one is due. `passed`: steps since the last decision."""
        explorer = self._evidence.explorer
        block = explorer.step(passed) or (None if choice.for_slo else self._new_block(problem, choice))
        speculates = self._speculates(choice)
        busy = choice.for_slo or any(step.now.prefill_tokens)
        requests = len(batch.requests)
        if self._evidence.truth.next_is_probe(requests, passed, speculating=speculates, prefill=busy):
            return self._plan(batch, step, _nothing(choice), Purpose.PROBE)
        if block is not None:
            if not explorer.running:
                self._upkeep.gate.shut()
            return self._plan_for_one(batch, block.draft_tokens, self._roster.names[block.drafter], Purpose.EXPLORE)
        if self._upkeep.gate.window and not speculates:
            return self._plan(batch, step, _nothing(choice), Purpose.EXPLORE)
        return None

    def _chosen(self, batch: Batch, step: Step, choice: DraftChoice, whole: Whole | None) -> DraftPlan:
        """The best choice, which is kept; or where holes are closed first, the best that they leave."""
        caught = {} if self._evidence.truth.off or whole is None else self._catch_up(batch, step, choice, whole)
        if caught:
            batch = _caught_up(batch, caught)
            step, _, choice = self._best(batch)
        purpose = Purpose.SLO if choice.for_slo else Purpose.CHOICE
        plan = self._plan(batch, step, choice if self._speculates(choice) else _nothing(choice), purpose)
        if caught:
            return dataclasses.replace(plan, catch_up=caught)
        self._longest_s = step.price.decode_s(plan.draft_tokens * step.requests)
        paying = _paying(step, choice) if purpose is Purpose.CHOICE else {}
        self._kept.keep(
            plan, step.now.id, paying, in_tow=self._upkeep.prompt_tokens_in_tow(step) > 0,
            in_general=self._with_room(step.now.remaining_tokens) >= MOST_OF_A_BATCH,
        )  # fmt: skip
        return plan

    def _with_room(self, remaining_tokens: Sequence[int]) -> float:
        """Share of the requests that could use proposals of any length."""
        return sum(left > self._limit + OF_THIS_STEP for left in remaining_tokens) / max(1, len(remaining_tokens))

    def _speculates(self, choice: DraftChoice) -> bool:
        return choice.draft_tokens > 0 and not self._evidence.truth.off

    def _under_pressure(self, step: Step, problem: DraftProblem) -> DraftProblem:
        """`problem` with who will be behind their TPOT, if anybody."""
        tpots_s = self._roster.tpots_s
        if not tpots_s or step.requests == 0:
            return problem
        limit = self._roster.settings.max_draft_tokens
        evidence = self._evidence
        found = pressure(step, problem, evidence.acceptance, limit, evidence.latency, tpots_s, self._drafts_s)
        return problem if found is None else dataclasses.replace(problem, pressure=found)

    def _plan(self, batch: Batch, step: Step, choice: DraftChoice, purpose: Purpose) -> DraftPlan:
        """`choice` for the engine. The neural draft also runs, proposing nothing, to keep its KV whole."""
        drafters: list[str | None] = [None] * len(batch.requests)
        for position, number in zip(step.positions, choice.drafters.tolist(), strict=True):
            drafters[position] = None if number == NOBODY else self._roster.names[number]
        runs = choice.neural_tokens > 0 or self._upkeep.runs(batch)
        return DraftPlan(choice.draft_tokens, tuple(drafters), runs, runs, choice.neural_tokens, purpose)

    def _plan_for_one(self, batch: Batch, draft_tokens: int, drafter: str | None, purpose: Purpose) -> DraftPlan:
        """`draft_tokens` from one drafter for every request that it can serve."""
        neural = self._roster.neural
        is_neural = neural is not None and neural.name == drafter
        served = [
            drafter
            if view.prefill_left == 0 and view.remaining_tokens > OF_THIS_STEP and (view.draft_ready or not is_neural)
            else None
            for view in batch.requests
        ]
        tokens = draft_tokens if any(served) else 0
        runs = is_neural and draft_tokens > 0
        if purpose is Purpose.EXPLORE:
            runs = runs or self._upkeep.runs(batch)
        drafters = tuple(served) if tokens else (None,) * len(served)
        return DraftPlan(tokens, drafters, runs, runs, tokens if is_neural else 0, purpose)

    def _choice_if_whole(self, step: Step, problem: DraftProblem, passed: int) -> Whole | None:
        """A look at what would be chosen if no request's draft KV had a hole; None where none has one, or not now.
        While holes are being closed, every decision looks. `passed`: steps since the last decision."""
        neural = problem.neural
        if neural == NOBODY or step.requests == 0 or not self._upkeep.usable[neural] or problem.usable[neural].all():
            return None
        self._since_look += passed
        if self._since_look < LOOK_EVERY_STEPS and not self._last.catch_up:
            return None
        self._since_look = 0
        assumed = self._problem(step, assume_ready=True)
        return Whole(assumed, choose_draft(assumed))

    def _catch_up(self, batch: Batch, step: Step, choice: DraftChoice, whole: Whole) -> dict[str, int]:
        """Whose holes the neural draft closes at the end of this step, see `holes_to_close`. A stranger closes none,
        and behind a closed gate nothing runs."""
        neural, evidence = self._roster.neural, self._evidence
        if neural is None or self._upkeep.gate.closed(len(batch.requests)):
            return {}
        if not evidence.acceptance.met[whole.problem.neural]:
            return {}
        draft_s = max(self._drafts_s, float(whole.problem.draft_s[whole.problem.neural, whole.choice.neural_tokens]))
        limit = self._roster.settings.max_draft_tokens
        spare = spare_s(step, evidence.acceptance, limit, evidence.latency, self._roster.tpots_s, draft_s)
        return holes_to_close(
            step.decoding, whole.problem, choice, whole.choice,
            lambda shape: evidence.latency.catch_up_s(neural.name, shape), Room(batch.token_budget, spare),
        )  # fmt: skip

    def _problem(self, step: Step, *, assume_ready: bool) -> DraftProblem:
        roster, evidence = self._roster, self._evidence
        return draft_problem(
            step, evidence.acceptance, evidence.latency, roster.settings.drafters, self._upkeep.usable, self._limit,
            assume_ready=assume_ready, prompt_tokens=self._upkeep.prompt_tokens_in_tow(step),
        )  # fmt: skip

    def _new_block(self, problem: DraftProblem, choice: DraftChoice) -> Block | None:
        """Start to explore: a drafter that is hardly known at once; else, every so often, the one with the highest
        upper bound, where that beats the choice or nothing is chosen."""
        acceptance, explorer = self._evidence.acceptance, self._evidence.explorer
        able = problem.usable.any(axis=1)
        unknown = able & ~acceptance.met
        if not able.any() or not explorer.due(eager=bool(unknown.any())):
            return None
        bounds = upper_bounds(problem, acceptance.upper_paths())
        bounds[unknown] = np.inf
        bounds[np.unique(choice.drafters[choice.drafters != NOBODY])] = -np.inf  # the choice tries these anyway
        if choice.neural_tokens > 0:
            bounds[problem.neural] = -np.inf
        drafter = problem.neural if self._upkeep.gate.window else int(bounds.argmax())
        if bounds[drafter] <= (choice.gain if self._speculates(choice) else -np.inf):
            explorer.postpone()
            return None
        explorer.start(drafter, int(problem.usable[drafter].sum()), self._limit)
        return explorer.step()

    @property
    def _limit(self) -> int:
        """Most draft tokens at present. Without a profile one more than was tried: further would be extrapolation."""
        limit = self._roster.most_tokens
        if self._evidence.latency.learning:
            limit = min(limit, self._evidence.longest + 1)
        return limit


def _paying(step: Step, choice: DraftChoice) -> Paying:
    """Empty where it is not known what a proposal is worth beside others."""
    if choice.paying is None:
        return {}
    perhaps = choice.paying if choice.perhaps_paying is None else choice.perhaps_paying
    counts = np.stack([choice.paying, perhaps], axis=2)  # (D, N, 2)
    return dict(zip(step.decoding.id, counts.swapaxes(0, 1).tolist(), strict=True))


def _nothing(choice: DraftChoice) -> DraftChoice:
    return nobody(len(choice.drafters), choice.plain_value)


def _caught_up(batch: Batch, caught: Mapping[str, int]) -> Batch:
    """`batch` with those ready whose holes are closed."""
    views = tuple(
        view._replace(draft_ready=True, draft_hole=0) if view.draft_hole and caught.get(view.id) == view.draft_hole
        else view
        for view in batch.requests
    )  # fmt: skip
    return dataclasses.replace(batch, requests=views)


def _fitting(lengths: Ints, budget: int) -> Ints:
    """As much of `lengths` as the budget holds, from the first request on."""
    before = np.cumsum(lengths) - lengths
    return np.clip(budget - before, 0, lengths)
