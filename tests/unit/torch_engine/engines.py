"""Engines on tiny models, under the real control loop, without a server."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from outrider_crds.draft_pool import DrafterSpec
from outrider_runtime.drafters.suffix import TENANT_ARGUMENT, MatchLengths
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.torch_engine.batch_scheduler import SchedulerLimits
from outrider_runtime.torch_engine.commit import FinishReason
from outrider_runtime.torch_engine.decoder import Hidden
from outrider_runtime.torch_engine.drafting import TorchDrafter
from outrider_runtime.torch_engine.drafts.beam import MAX_WIDTH
from outrider_runtime.torch_engine.drafts.draft_model_drafter import DraftModelDrafter
from outrider_runtime.torch_engine.drafts.eagle_drafter import EagleDrafter
from outrider_runtime.torch_engine.drafts.suffix_drafter import SuffixDrafter
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.inference_engine import EngineModels, InferenceEngine, Output
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel, Segment
from outrider_runtime.torch_engine.token_sampling import TokenLogprobs

from tests.engine import engines
from tests.engine.engines import boot_config, hot_config

LONGEST = 200
CPU = torch.device("cpu")
LIMITS = SchedulerLimits(4, 32)
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(seed=11, temperature=0.8, top_p=0.95, presence_penalty=0.3)


class Letters:
    """Detokenizer of a vocabulary whose tokens are letters."""

    def step(self, token: int) -> str:
        return chr(33 + token)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass
class Harness:
    """An engine with the answers to its requests so far."""

    engine: InferenceEngine
    loop: ControlLoop
    answers: dict[str, Answer] = field(default_factory=dict)
    serial: Any = field(default_factory=itertools.count)

    def add(
        self, prompt: Sequence[int], max_tokens: int = 20, sampling: Sampling = GREEDY, slo_class: str | None = None,
        tenant: str | None = None, **stops: Any,
    ) -> str:  # fmt: skip
        name = f"r{next(self.serial)}"
        request = Request(name, list(prompt), len(prompt), Stops(max_tokens, **stops), sampling, Letters())
        self.answers[name] = Answer()
        named = {"slo_class": slo_class, TENANT_ARGUMENT: tenant}
        self.engine.add(request, time.time(), {name: value for name, value in named.items() if value is not None})
        return name

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            answer = self.answers[output.request]
            answer.tokens += output.tokens
            answer.text += output.text
            answer.logprobs += output.logprobs
            answer.finish = output.finish
        return outputs

    def finish(self) -> dict[str, Answer]:
        for _ in range(5000):
            if not self.engine.has_work:
                return self.answers
            self.step()
        raise AssertionError("the engine does not come to an end")


def make_harness(
    target: Path, specs: Sequence[DrafterSpec] = (), make: Any = None, *, kv_tokens: int = 4 * LONGEST,
    limits: SchedulerLimits = LIMITS, draft_bytes: Sequence[int] = (),
) -> Harness:  # fmt: skip
    """Build an engine. specs: the draft pool; make: builds its drafters from the target and the KV pool. kv_tokens: KV
    memory, in tokens of the target."""
    model = CachedModel(target, 0, dtype=torch.float32, device=CPU)
    pool = KVPool(kv_tokens * model.cache.bytes_per_token, [model.cache.bytes_per_token, *draft_bytes], LONGEST + 8)
    drafters: Sequence[TorchDrafter] = make(model, pool) if make else ()
    layers = tuple(sorted({layer for drafter in drafters for layer in drafter.layers}))
    boot, hot = boot_config(specs, max_draft_tokens=4), hot_config(max_draft_tokens=4)
    loop = ControlLoop(boot, hot, specs, max_requests=4, widest=MAX_WIDTH)
    return Harness(InferenceEngine(EngineModels(model, drafters, layers), pool, loop, limits, LONGEST), loop)


def pool_of_three(models: Path, made: list[Any] | None = None) -> dict[str, Any]:
    """Build arguments of `make_harness`: prompt lookup, and the draft model and head of `models`. made: gets them."""

    def make(target: CachedModel, pool: KVPool) -> list[TorchDrafter]:
        draft = CachedModel(models / "draft", 2, dtype=torch.float32, device=CPU)
        drafters: list[TorchDrafter] = [
            SuffixDrafter(MatchLengths(1, 3)), DraftModelDrafter(draft, pool),
            EagleDrafter(models / "head", 3, target, pool),
        ]  # fmt: skip
        (made if made is not None else []).extend(drafters)
        return drafters

    specs = [engines.lookup(), engines.draft_model(models / "draft"), engines.eagle(models / "head")]
    return {"specs": specs, "make": make, "draft_bytes": [1, 288, 96]}


def texts(count: int = 5) -> list[list[int]]:
    """Draw prompts with repetitions, so that lookups find proposals."""
    draws = random.Random(2)
    return [[draws.randrange(12) for _ in range(draws.randrange(3, 60))] for _ in range(count)]


def answers(harness: Harness, sampling: Sampling, before_step: Callable[[], None] = lambda: None) -> list[list[int]]:
    for text in texts():
        harness.add(text, 40, sampling)
    while harness.engine.has_work:
        before_step()
        harness.step()
    return [answer.tokens for answer in harness.answers.values()]


def fresh(model: CachedModel, tokens: list[int], kept_layers: Sequence[int] = ()) -> tuple[torch.Tensor, Hidden]:
    """Return the KV and hidden states of a prefill. kept_layers: layers whose input is returned too."""
    pool = KVPool(1 << 24, [model.cache.bytes_per_token] * (model.number + 1), LONGEST)
    pool.grow(Holder(model.number, "fresh"), len(tokens))
    hidden = model.run([Segment("fresh", tokens, 0)], pool, kept_layers)
    kept = model.cache["fresh"].buffer[:, :, :, : len(tokens)].clone()
    model.cache.forget("fresh")
    return kept, hidden


def assert_same_as_fresh(model: CachedModel, name: str, tokens: list[int]) -> None:
    length = model.cache.length(name)
    if length:
        kept = model.cache[name].buffer[:, :, :, :length]
        assert (kept - fresh(model, tokens[:length])[0]).abs().max() < 1e-4
