"""A simulated device: runs scheduled steps of a target and its drafters, as recorded, with a world's step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.control.plans import DraftPlan
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.recording import Recording
from outrider_runtime.simulate.replay.recorded_proposals import RecordedProposals
from outrider_runtime.simulate.replay.replay_caches import ReplayCaches
from outrider_runtime.simulate.replay.replay_requests import ReplayRequests, RequestStates, Rows
from outrider_runtime.simulate.replay.workload import Ints
from outrider_runtime.simulate.worlds.world import Pass, World

CATCH_UP_TOKENS = 16
"""A draft that catches up on more tokens of a decoding request is timed like a prefill."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStep:
    """Times and results of a step."""

    target_s: float
    draft_s: dict[int, float]
    """Seconds of each drafter that ran, by number."""
    accepted: Ints
    """(N,): accepted proposals."""
    tokens: Ints
    """(N,): output tokens."""

    @property
    def seconds(self) -> float:
        return self.target_s + sum(self.draft_s.values())

    def each_draft_s(self, drafters: int) -> NDArray[np.float64]:
        """(drafters,): seconds of each drafter; NaN: it did not run."""
        return np.array([self.draft_s.get(number, np.nan) for number in range(drafters)])


class Device:
    """Runs steps. D drafters in the pool's order, N requests of a step."""

    def __init__(
        self, world: World, recording: Recording, drafters: Sequence[Drafter], requests: ReplayRequests
    ) -> None:
        self.world, self.drafters, self.requests = world, drafters, requests
        self.caches = ReplayCaches(drafters, len(requests.load))
        self.proposals = RecordedProposals(recording, drafters, requests)

    def forget(self, preempted: Rows) -> None:
        self.requests.preempt(preempted)
        self.caches.forget(preempted)
        self.proposals.clear(preempted)

    def run(
        self, states: RequestStates, tokens: Ints, verified: Ints, accepted: Ints, plan: DraftPlan, fed: Ints
    ) -> DeviceStep:  # fmt: skip
        """Run a step; at its end the plan's drafters propose. It updates the requests, except for their times.

        tokens: (N,), tokens of the step. verified: (N,), proposals among them. accepted: (N,), accepted proposals among
        those. fed: (D, N), tokens that each drafter processes.
        """
        target_pass, draft_s = _target_pass(states, tokens), self._draft_s(plan, states, fed)
        accepted = np.where(states.decodes, accepted, 0)
        committed = tokens - verified + accepted
        self.caches.feed(states, fed, np.where(states.decodes, 0, tokens), committed)
        made = self._advance(states, tokens, committed, accepted)
        self.proposals.expect(states.rows, plan)
        if plan.passes.any():
            after = self.requests.select(states.rows)
            self.proposals.propose(after, plan, *self.caches.columns(after, np.zeros_like(after.rows)))
        return DeviceStep(self.world.target_s(target_pass), draft_s, accepted, made)

    def _draft_s(self, plan: DraftPlan, states: RequestStates, fed: Ints) -> dict[int, float]:
        seconds = {}
        for number, passes in enumerate(plan.passes.tolist()):
            proposes = (plan.drafter_order == number).any(0) & (passes > 0)
            drafted, drafter = int(np.count_nonzero(proposes)), self.drafters[number]
            if drafted or fed[number].any():
                requests = int(np.count_nonzero(states.decodes)) if drafter.stands_in else drafted
                if drafter.is_target:
                    context = states.context[proposes]
                    read, whole = _read(context, drafter.kv_budget), _read(context, None)
                    first_pass = Pass(drafted, drafted, read, drafted, whole_context=whole)
                else:
                    first_pass = _draft_pass(states, fed[number], requests, drafter.kv_budget)
                seconds[number] = self.world.draft_s(drafter.name, first_pass, passes, int(plan.widths[number]))
        return seconds

    def _advance(self, states: RequestStates, tokens: Ints, committed: Ints, accepted: Ints) -> Ints:
        """(N,): output tokens; a request in prefill gets none."""
        self.requests.context[states.rows] = states.context + committed
        yields = states.decodes | (tokens == states.todo)
        made = np.where(yields, np.minimum(1 + accepted, states.left), 0)
        self.requests.produced[states.rows] = states.produced + made
        return made


def _target_pass(states: RequestStates, tokens: Ints) -> Pass:
    decodes = states.decodes
    requests, context = _decoding(states)
    if requests == len(tokens):
        batched = int(tokens.sum())
        return Pass(batched, requests, context, batched, (), bool(tokens.min() == tokens.max()))
    prompts, decoding = (~decodes).nonzero()[0], tokens[decodes]
    logits = int(decoding.sum()) + int(np.count_nonzero(tokens[prompts] == states.todo[prompts]))
    chunks = list(zip(tokens[prompts].tolist(), states.context[prompts].tolist(), strict=True))
    even = requests == 0 or bool(decoding.min() == decoding.max())
    return Pass(int(tokens.sum()), requests, context, logits, chunks, even)


def _draft_pass(states: RequestStates, fed: Ints, requests: int, budget: int | None) -> Pass:
    """Make the first pass of a drafter over `fed` (N,) tokens; large ones are timed like a prefill."""
    long = ((fed > 0) & (~states.decodes | (fed > CATCH_UP_TOKENS))).nonzero()[0]
    prefix = np.maximum(0, states.context[long] - fed[long])
    chunks = list(zip(fed[long].tolist(), _bound_to_budget(prefix, budget).tolist(), strict=True))
    read = _read(states.context[states.decodes], budget)
    return Pass(max(int(fed.sum()), requests), requests, read, max(requests, 1), chunks)


def _bound_to_budget(context: Ints, budget: int | None) -> Ints:
    return context if budget is None else np.minimum(context, budget)


def _read(context: Ints, budget: int | None) -> float:
    """Return the mean number of cached tokens that a pass reads per request."""
    return float(_bound_to_budget(context, budget).mean()) if len(context) else 0.0


def _decoding(states: RequestStates) -> tuple[int, float]:
    """Return the number of decoding requests, and their mean context."""
    requests = int(np.count_nonzero(states.decodes))
    return requests, float((states.context * states.decodes).sum()) / requests if requests else 0.0
