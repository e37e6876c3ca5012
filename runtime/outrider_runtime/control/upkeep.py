"""Whether the neural draft runs where it proposes nothing: over prompts, and so that its KV stays whole.

TurboSpec (section 4.2) asks the gate alone, which is met in decoding. Asked here besides: whether the crowd whose
prompts are read will be one that the draft serves, and what a hole in the draft's KV costs.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.batch import Batch
from outrider_runtime.control.drafting import NOBODY, DraftChoice, DraftProblem
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.gate import DraftGate, pays_for
from outrider_runtime.control.problem import Step
from outrider_runtime.control.roster import Roster
from outrider_runtime.control.settings import DraftPrefill


class Upkeep:
    def __init__(self, roster: Roster, evidence: Evidence) -> None:
        self._roster = roster
        self._evidence = evidence
        self.gate = DraftGate()
        self.gated = False
        """At the last look the batch was too large for the neural draft."""
        self._reads = True
        """What a hole costs asks for the draft to run where it proposes nothing, in this decision."""
        self._in_vain = False
        """As of the last look, the draft does not run, whatever the gate says: see `_reads_in_vain`."""

    def look(self, batch: Batch, limit: int) -> None:
        """A decision begins. limit: most draft tokens at present."""
        self._reads = self._is_worth_reading(batch)
        self._in_vain = self._reads_in_vain(batch, limit)
        self.gated |= self._in_vain

    def runs(self, batch: Batch) -> bool:
        """Whether the draft runs over `batch` though it proposes nothing."""
        if not self._roster.neural_runs:
            return False
        if self._roster.hot.draft_prefill is DraftPrefill.ALWAYS:
            return True
        if self._evidence.truth.off or self.gate.closed(len(batch.requests)) or self._in_vain:
            return False
        return self._reads and any(view.draft_ready or view.prefill_tokens > 0 for view in batch.requests)

    def skips_prompts(self, requests: int) -> bool:
        """Whether prompts pass the draft by in a batch of so many requests in which it proposes nothing."""
        if not self._roster.neural_runs or self._evidence.truth.off:
            return True
        if self._roster.hot.draft_prefill is DraftPrefill.ALWAYS:
            return False
        holes = self._evidence.holes
        if holes is not None:
            return holes.settled or self._in_vain
        return self.gate.closed(requests) and not self._evidence.explorer.due()

    @property
    def usable(self) -> NDArray[np.bool_]:
        """(D,): drafters that may run at all, in this decision."""
        neural, usable = self._roster.neural, self._roster.usable
        if not self._in_vain or neural is None:
            return usable
        others: NDArray[np.bool_] = np.arange(len(usable)) != self._evidence.acceptance.index[neural.name]
        return usable & others

    def prompt_tokens_in_tow(self, step: Step) -> int:
        """Prompt tokens of the step under way that the draft would read only because it proposes."""
        return 0 if self._reads else sum(step.now.prefill_tokens)

    def update(self, step: Step, problem: DraftProblem, choice: DraftChoice, if_whole: DraftChoice | None) -> None:
        """Tell the gate whether the draft would be used here if its KV were whole for every request. `if_whole`: the
        choice in that case, where it was looked at."""
        neural, requests = problem.neural, len(step.now.id)
        self.gate.step()
        if neural == NOBODY or step.requests == 0 or not self.usable[neural]:
            return
        self._let_a_prompt_through(step)
        if not problem.usable[neural].all():
            if if_whole is None:
                return
            choice = if_whole
        warming_up = not self._evidence.acceptance.met[neural] and not self.gate.closed(requests)
        if warming_up or self._evidence.truth.off or self.prompt_tokens_in_tow(step):
            return  # the threshold is for load: neither a stranger nor a prompt or the guard moves it
        self.gate.update(requests, worth=choice.neural_tokens > 0)
        self.gated = requests >= self.gate.threshold

    def _let_a_prompt_through(self, step: Step) -> None:
        """A closed gate opens for a new request, so that there is one without a hole to explore on."""
        holes = self._evidence.holes
        wanted = any(step.now.prefill_tokens) and (holes is None or not holes.settled)
        if wanted and self.gate.closed(len(step.now.id)) and self._evidence.explorer.due():
            self.gate.let_through()
            self._reads = True

    def _is_worth_reading(self, batch: Batch) -> bool:
        holes = self._evidence.holes
        if holes is None or self.gate.window:
            return True
        return holes.reads_next_prompt() if any(view.prefill_tokens for view in batch.requests) else holes.matter

    def _reads_in_vain(self, batch: Batch, limit: int) -> bool:
        """Prompts are read for a batch that will be too large for the draft when it decodes. (Where it would not pay
        for one request either, the text is to blame, and that may change: exploration sees to it.)"""
        neural, acceptance, views = self._roster.neural, self._evidence.acceptance, batch.requests
        if neural is None or not any(view.prefill_tokens for view in views):
            return False
        number = acceptance.index[neural.name]
        if not acceptance.met[number]:
            return False
        context = sum(view.context_tokens + view.prefill_tokens + view.prefill_left for view in views) / len(views)
        path = acceptance.hazards[number, :limit].cumprod()
        pays = partial(
            pays_for, context_tokens=context, path=path, neural=neural.name, latency=self._evidence.latency,
            goodput=self._evidence.goodput,
        )  # fmt: skip
        return pays(1) and not pays(len(views) + batch.waiting)
