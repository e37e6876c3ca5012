"""Brings an engine to one shape after the other and times its steps: sets batch and draft lengths, collects times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider_runtime.loop.steps import FinishedStep
from outrider_runtime.profiler.core_speed import CoreSpeed
from outrider_runtime.profiler.engines.measurable import ProfilerEngine
from outrider_runtime.profiler.grid import HEADROOM_TOKENS, EngineLimits, GridPoint, StepPace, prefills
from outrider_runtime.profiler.host_protocol import Ready, VisitOrder
from outrider_runtime.profiler.step_samples import MeasuredStep, Visit

SEED = 7  # any: prompts and proposals are the same at every measurement
MAX_SET_UP_STEPS = 10_000
"""A batch that does not decode after so many steps never will, for example for want of KV memory."""
AGREEMENT = 0.03
"""Relative difference of the two fastest steps up to which both count as undisturbed."""
_PACE_BATCH, _PACE_CONTEXT = 8, 64
"""The first shape that is measured: small, and enough to estimate the time of all others."""


class Driver:
    """Measures shapes with one engine, which runs in this process."""

    def __init__(self, engine: ProfilerEngine) -> None:
        self._engine = engine
        self._loop = engine.loop
        self._steps: list[FinishedStep] = []
        self._loop.listeners.append(self._steps.append)
        self._speed = CoreSpeed() if engine.on_cpu else None
        self._rng = np.random.default_rng(SEED)
        self._batch: list[str] = []
        self._group = 0, 0
        """Context tokens of the batch, and the neural drafter whose KV cache has its prompts (see `_prefilled_by`)."""
        self._serial = 0

    def ready(self) -> Ready:
        """Return the facts of the engine. The steps that measure its pace also warm it up."""
        drafters = {drafter.name: drafter for drafter in self._loop.settings.drafters}
        return Ready(self._engine.limits, self.pace(), self._engine.device, self._engine.version, drafters)

    def pace(self) -> StepPace:
        """Estimate step times from three shapes: one request, a batch, and a step with a prompt."""
        limits = self._engine.limits
        batch = min(_PACE_BATCH, limits.max_requests)
        shortest_s = self._shortest(GridPoint(_PACE_CONTEXT, 1))
        batch_s = self._shortest(GridPoint(_PACE_CONTEXT, batch, limits.max_draft_tokens))
        more_tokens = batch * (limits.max_draft_tokens + 1) - 1
        token_s = max(batch_s - shortest_s, 0.01 * shortest_s) / max(more_tokens, 1)
        return StepPace(shortest_s, token_s, max(token_s, self._prompt_token_s(limits, shortest_s)))

    def _prompt_token_s(self, limits: EngineLimits, decode_s: float) -> float:
        """Return seconds per prompt token; 0 if no prompt fits into a step with another request.

        decode_s: seconds of the same step without a prompt.
        """
        longest = max((tokens for tokens in prefills(limits, 1) if tokens < limits.step_tokens), default=0)
        if not longest:
            return 0.0
        point = GridPoint(_PACE_CONTEXT, 1, prefill=longest)
        return (self._shortest(point, steps=2, most_steps=2, settle=1) - decode_s) / longest

    def visit(self, order: VisitOrder) -> Visit:
        """Measure one shape. The requests stay in the batch, so that the next shape needs fewer new ones."""
        self._loop.pin(order.point.verify if order.drafter else 0, order.drafter, order.point.width)
        self._loop.profiled_placeholders = order.point.verify
        self._arrange(order.point, order.drafter)
        self._engine.step()  # its proposals have the draft length that the next step verifies
        for _ in range(order.settle + self._engine.report_delay_steps):
            self._measured_step(order.point)
        samples: list[MeasuredStep] = []
        for done in range(order.most_steps):
            if done >= order.steps and _agree(samples):
                break
            samples += self._measured_step(order.point)
        return Visit(order.point, tuple(samples), self._suspension(order.drafter))

    def _suspension(self, drafter: str | None) -> str:
        state = self._loop.state().drafters.get(drafter or "")
        return state.suspended if state else ""

    def _shortest(self, point: GridPoint, *, steps: int = 3, most_steps: int = 9, settle: int = 2) -> float:
        hosted = self._loop.hosted
        drafter = hosted[0].name if hosted and point.verify else None
        visit = self.visit(VisitOrder(point, drafter, steps=steps, most_steps=most_steps, settle=settle))
        return min(sample.target_s for sample in visit.samples)

    def _arrange(self, point: GridPoint, drafter: str | None) -> None:
        """Run steps until the batch is `point.batch` decoding requests with `point.context` cached tokens each."""
        group = point.context, self._prefilled_by(drafter)
        if group != self._group or len(self._batch) > point.batch or self._grown_long():
            self._clear()
        self._group = group
        while len(self._batch) < point.batch:
            self._batch.append(self._add(_prompt(self._engine.vocabulary, group, len(self._batch))))
        for _ in range(MAX_SET_UP_STEPS):
            if self._all_decode(point.batch):
                return
            self._engine.step()
        raise RuntimeError(f"the engine did not reach a decoding batch of {point.batch} x {point.context} tokens")

    def _prefilled_by(self, drafter: str | None) -> int:
        """Return the drafter's position among those with a KV cache, counted from 1; 0 if it has none."""
        readers = [drafter.name for drafter in self._loop.settings.drafters if drafter.reads]
        return readers.index(drafter) + 1 if drafter in readers else 0

    def _all_decode(self, batch: int) -> bool:
        running = self._engine.running
        return len(running) == batch and all(request.decodes for request in running)

    def _grown_long(self) -> bool:
        """Whether a request must start again: each gains a token a step, and must stay below the model's limit."""
        context, _ = self._group
        room = min(HEADROOM_TOKENS, self._engine.limits.max_model_len - context)
        return any(request.tokens > context + room // 2 for request in self._engine.running)

    def _measured_step(self, point: GridPoint) -> list[MeasuredStep]:
        """Run one step of `point`. Return what the loop reports meanwhile: this step, or an earlier one."""
        prompt = self._add(self._random_tokens(point.prefill)) if point.prefill else None
        self._set_draft_lengths(point)
        self._steps.clear()
        speed_before = self._current_speed()
        self._engine.step()
        speed = (speed_before + self._current_speed()) / 2
        if prompt is not None:
            self._engine.drop([prompt])
        return [self._sample(step).scale_to_full_speed(speed) for step in self._steps]

    def _sample(self, step: FinishedStep) -> MeasuredStep:
        outcome = step.outcome
        drafts_s = {
            drafter.name: seconds
            for drafter, seconds in zip(self._loop.hosted, outcome.draft_s.tolist(), strict=True)
            if not math.isnan(seconds)
        }
        is_measured = not math.isnan(outcome.target_s)
        target_s = outcome.target_s if is_measured else outcome.step_s - sum(drafts_s.values())
        plan = outcome.draft_plan
        return MeasuredStep(
            step.shape, outcome.mode, target_s, plan.draft_tokens, int(plan.widths.max(initial=1)), drafts_s
        )

    def _current_speed(self) -> float:
        return self._speed.current() if self._speed is not None else 1.0

    def _set_draft_lengths(self, point: GridPoint) -> None:
        """Make the next step verify the draft lengths of `point`, whatever the drafter proposed."""
        self._engine.set_draft_lengths(
            [
                (0 if point.uneven and index % 2 else point.verify) if request.decodes else 0
                for index, request in enumerate(self._engine.running)
            ]
        )

    def _add(self, tokens: Sequence[int]) -> str:
        self._serial += 1
        name = f"profile-{self._serial}"
        self._engine.add(name, tokens)
        return name

    def _clear(self) -> None:
        """Drop every request, and run one more step if the engine needs it to free them."""
        self._engine.drop(self._batch)
        self._batch = []
        if self._engine.has_requests:
            self._engine.step()

    def _random_tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._rng.integers(0, self._engine.vocabulary, size=count)]


def _agree(samples: Sequence[MeasuredStep]) -> bool:
    """Whether the two fastest steps took about the same time, so that neither was disturbed."""
    fastest = sorted(sample.target_s + sum(sample.draft_s.values()) for sample in samples)[:2]
    return len(fastest) == 2 and fastest[1] <= (1 + AGREEMENT) * fastest[0]


def _prompt(vocabulary: int, group: tuple[int, int], index: int) -> list[int]:
    """Return prompt `index`. It is the same at every visit, so that the prefix cache saves most of its prefill.

    It is one token longer than its context: the cache holds whole blocks, and the last token is always computed.
    Each neural drafter has prompts of its own: blocks that were computed without that drafter lack its KV.
    """
    context, drafter_number = group
    tokens = np.random.default_rng([SEED, index, drafter_number]).integers(0, vocabulary, size=context + 1)
    return [int(token) for token in tokens]
