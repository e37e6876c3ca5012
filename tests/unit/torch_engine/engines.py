"""Engines on tiny models, under the real loop, without a server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from outrider_crds.spec import Drafter as Spec
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.torch_engine.commit import Finish
from outrider_runtime.torch_engine.drafting import Drafter
from outrider_runtime.torch_engine.drafts.beam import WIDEST
from outrider_runtime.torch_engine.engine import Engine, Models, Output
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.requests import Request, Sampling, Stops
from outrider_runtime.torch_engine.runner import Model
from outrider_runtime.torch_engine.sampling import TokenLogprobs
from outrider_runtime.torch_engine.scheduler import Limits

from tests.engine.engines import boot_config, hot_config

LONGEST = 200
CPU = torch.device("cpu")
LIMITS = Limits(4, 32)
GREEDY = Sampling(temperature=0.0)


class Letters:
    """A token is a letter."""

    def step(self, token: int) -> str:
        return chr(33 + token)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


@dataclass
class Bench:
    """An engine, and what came of its requests."""

    engine: Engine
    loop: ControlLoop
    answers: dict[str, Answer] = field(default_factory=dict)
    serial: Any = field(default_factory=itertools.count)

    def add(
        self, prompt: Sequence[int], max_tokens: int = 20, sampling: Sampling = GREEDY, slo_class: str | None = None,
        **stops: Any,
    ) -> str:  # fmt: skip
        name = f"r{next(self.serial)}"
        request = Request(name, list(prompt), len(prompt), Stops(max_tokens, **stops), sampling, Letters())
        self.answers[name] = Answer()
        self.engine.add(request, time.time(), slo_class)
        return name

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        for one in outputs:
            answer = self.answers[one.request]
            answer.tokens += one.tokens
            answer.text += one.text
            answer.logprobs += one.logprobs
            answer.finish = one.finish
        return outputs

    def finish(self) -> dict[str, Answer]:
        for _ in range(5000):
            if not self.engine.has_work:
                return self.answers
            self.step()
        raise AssertionError("the engine does not come to an end")


def bench(
    target: Path, specs: Sequence[Spec] = (), make: Any = None, *, kv_tokens: int = 4 * LONGEST,
    limits: Limits = LIMITS, draft_bytes: Sequence[int] = (),
) -> Bench:  # fmt: skip
    """specs: the pool; make: from the target and the KV pool to its drafters. kv_tokens: of the target's."""
    model = Model(target, 0, dtype=torch.float32, device=CPU)
    pool = KVPool(kv_tokens * model.cache.bytes_per_token, [model.cache.bytes_per_token, *draft_bytes], LONGEST + 8)
    drafters: Sequence[Drafter] = make(model, pool) if make else ()
    layers = tuple(sorted({layer for one in drafters for layer in one.layers}))
    boot, hot = boot_config(specs, max_draft_tokens=4), hot_config(max_draft_tokens=4)
    loop = ControlLoop(boot, hot, specs, max_requests=4, widest=WIDEST)
    return Bench(Engine(Models(model, drafters, layers), pool, loop, limits, LONGEST), loop)
