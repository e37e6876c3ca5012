"""Drives an engine from shape to shape: fills the batch, writes the proposals, collects the outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider_runtime.loop.steps import Told
from outrider_runtime.profiler.core_speed import CoreSpeed
from outrider_runtime.profiler.engines.engine import Engine
from outrider_runtime.profiler.grid import HEADROOM_TOKENS, GridPoint, Limits, Pace, prefills
from outrider_runtime.profiler.protocol import Ask, Ready
from outrider_runtime.profiler.samples import Sample, Visit

SEED = 7
LONGEST_SET_UP = 10_000
"""Steps; a batch that is not decoding by then never will be (no KV memory left, say)."""
AGREEMENT = 0.03
_PACE_BATCH = 8
_PACE_CONTEXT = 64


class Driver:
    """One engine, in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = engine.loop
        self._steps: list[Told] = []
        self._loop.listeners.append(self._steps.append)
        self._speed = CoreSpeed() if engine.on_cpu else None
        self._rng = np.random.default_rng(SEED)
        self._batch: list[str] = []
        self._group = 0, 0
        """Context of the batch, and which neural draft saw its prompts (see `_seen_by`)."""
        self._serial = 0

    def ready(self) -> Ready:
        """What is known of the engine; the first steps also warm it up."""
        drafters = {one.name: one for one in self._loop.settings.drafters}
        return Ready(self._engine.limits, self.pace(), self._engine.device, self._engine.version, drafters)

    def pace(self) -> Pace:
        """Rough step times, from the smallest batch, a larger one and a prompt."""
        limits = self._engine.limits
        batch = min(_PACE_BATCH, limits.max_requests)
        one = self._shortest(GridPoint(_PACE_CONTEXT, 1))
        many = self._shortest(GridPoint(_PACE_CONTEXT, batch, limits.max_draft_tokens))
        tokens = batch * (limits.max_draft_tokens + 1) - 1
        token_s = max(many - one, 0.01 * one) / max(tokens, 1)
        return Pace(one, token_s, max(token_s, self._prompt_token_s(limits, one)))

    def _prompt_token_s(self, limits: Limits, one: float) -> float:
        """one: seconds of a step without a prompt. 0 where none fits in beside another request."""
        longest = max((tokens for tokens in prefills(limits, 1) if tokens < limits.step_tokens), default=0)
        if not longest:
            return 0.0
        point = GridPoint(_PACE_CONTEXT, 1, prefill=longest)
        return (self._shortest(point, steps=2, most_steps=2, settle=1) - one) / longest

    def visit(self, ask: Ask) -> Visit:
        """Measure one shape. The batch stays, for the next shape to grow from."""
        self._loop.pin(ask.point.verify if ask.drafter else 0, ask.drafter, ask.point.width)
        self._loop.places = ask.point.verify
        self._arrange(ask.point, ask.drafter)
        self._engine.step()  # the worker has proposed as many tokens as the next one verifies
        for _ in range(ask.settle + self._engine.told_late):
            self._measured_step(ask.point)
        samples: list[Sample] = []
        for done in range(ask.most_steps):
            if done >= ask.steps and _agree(samples):
                break
            samples += self._measured_step(ask.point)
        return Visit(ask.point, tuple(samples), self._suspension(ask.drafter))

    def _suspension(self, drafter: str | None) -> str:
        found = self._loop.state().drafters.get(drafter or "")
        return found.suspended if found else ""

    def _shortest(self, point: GridPoint, *, steps: int = 3, most_steps: int = 9, settle: int = 2) -> float:
        hosted = self._loop.hosted
        drafter = hosted[0].name if hosted and point.verify else None
        visit = self.visit(Ask(point, drafter, steps=steps, most_steps=most_steps, settle=settle))
        return min(sample.target_s for sample in visit.samples)

    def _arrange(self, point: GridPoint, drafter: str | None) -> None:
        """Bring `point.batch` requests of `point.context` cached tokens to where they decode."""
        group = point.context, self._seen_by(drafter)
        if group != self._group or len(self._batch) > point.batch or self._grown_long():
            self._clear()
        self._group = group
        while len(self._batch) < point.batch:
            self._batch.append(self._add(_prompt(self._engine.vocabulary, group, len(self._batch))))
        for _ in range(LONGEST_SET_UP):
            if self._all_decode(point.batch):
                return
            self._engine.step()
        raise RuntimeError(f"the engine never got a batch of {point.batch} x {point.context} tokens to decode")

    def _seen_by(self, drafter: str | None) -> int:
        """Place in the pool, from 1 on, of a drafter that reads; 0: none."""
        readers = [drafter.name for drafter in self._loop.settings.drafters if drafter.reads]
        return readers.index(drafter) + 1 if drafter in readers else 0

    def _all_decode(self, batch: int) -> bool:
        running = self._engine.running
        return len(running) == batch and all(one.decodes for one in running)

    def _grown_long(self) -> bool:
        """Requests gain a token a step: before they reach the model's length limit, start from their prompts again."""
        context, _ = self._group
        room = min(HEADROOM_TOKENS, self._engine.limits.max_model_len - context)
        return any(one.tokens > context + room // 2 for one in self._engine.running)

    def _measured_step(self, point: GridPoint) -> list[Sample]:
        """One step of `point`, and what the loop was told of meanwhile: this one, or one of those before it."""
        added = self._add(self._random_tokens(point.prefill)) if point.prefill else None
        self._propose(point)
        self._steps.clear()
        before = self._speed_now()
        self._engine.step()
        speed = (before + self._speed_now()) / 2
        if added is not None:
            self._engine.drop([added])
        return [self._sample(step).at(speed) for step in self._steps]

    def _sample(self, step: Told) -> Sample:
        outcome = step.outcome
        drafts_s = {
            one.name: seconds
            for one, seconds in zip(self._loop.hosted, outcome.draft_s.tolist(), strict=True)
            if not math.isnan(seconds)
        }
        measured = not math.isnan(outcome.target_s)
        target_s = outcome.target_s if measured else outcome.step_s - sum(drafts_s.values())
        plan = outcome.draft_plan
        return Sample(step.shape, outcome.mode, target_s, plan.draft_tokens, int(plan.widths.max(initial=1)), drafts_s)

    def _speed_now(self) -> float:
        return self._speed.now() if self._speed is not None else 1.0

    def _propose(self, point: GridPoint) -> None:
        """Verify so many places, whatever the drafter found."""
        self._engine.hold(
            [
                (0 if point.uneven and index % 2 else point.verify) if one.decodes else 0
                for index, one in enumerate(self._engine.running)
            ]
        )

    def _add(self, tokens: Sequence[int]) -> str:
        self._serial += 1
        name = f"profile-{self._serial}"
        self._engine.add(name, tokens)
        return name

    def _clear(self) -> None:
        """Drop every request. One more step where the engine needs it to forget them."""
        self._engine.drop(self._batch)
        self._batch = []
        if self._engine.has_requests:
            self._engine.step()

    def _random_tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._rng.integers(0, self._engine.vocabulary, size=count)]


def _agree(samples: Sequence[Sample]) -> bool:
    """The two fastest steps took about the same: neither of them was disturbed."""
    fastest = sorted(sample.target_s + sum(sample.draft_s.values()) for sample in samples)[:2]
    return len(fastest) == 2 and fastest[1] <= (1 + AGREEMENT) * fastest[0]


def _prompt(vocabulary: int, group: tuple[int, int], index: int) -> list[int]:
    """Prompt `index`; the same at every visit, so that the prefix cache spares most of its prefill.

    It is one token longer than its context: the cache holds whole blocks, and the last token is always computed.
    Each neural draft has prompts of its own: blocks that were computed without it lack its KV.
    """
    context, seen_by = group
    tokens = np.random.default_rng([SEED, index, seen_by]).integers(0, vocabulary, size=context + 1)
    return [int(token) for token in tokens]
