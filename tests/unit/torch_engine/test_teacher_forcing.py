"""Greedy answers, compared token by token with the logits of the same model in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from outrider_crds.draft_pool import DrafterSpec
from outrider_runtime.drafters.suffix import MatchLengths
from outrider_runtime.torch_engine.batch_scheduler import SchedulerLimits
from outrider_runtime.torch_engine.drafting import TorchDrafter
from outrider_runtime.torch_engine.drafts.beam import MAX_WIDTH
from outrider_runtime.torch_engine.drafts.draft_model_drafter import DraftModelDrafter
from outrider_runtime.torch_engine.drafts.eagle_drafter import EagleDrafter
from outrider_runtime.torch_engine.drafts.medusa_drafter import MedusaDrafter
from outrider_runtime.torch_engine.drafts.suffix_drafter import SuffixDrafter
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel
from transformers import AutoModelForCausalLM

from bench.teacher_forcing import LEAST_BEST, WORST_GAP, gaps
from tests.engine import engines
from tests.unit.torch_engine.engines import CPU, make_harness
from tests.unit.torch_engine.models import write_head, write_medusa, write_pair

PROMPTS, TOKENS = 12, 100
ARMS = [("pld", 1), *((name, width) for name in ("draft", "eagle", "medusa") for width in (1, MAX_WIDTH))]
"""Drafter and width; a lookup proposes chains only."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder, 0.4)
    write_head(folder / "eagle")
    write_medusa(folder / "medusa")
    return folder


def pool(models: Path) -> list[DrafterSpec]:
    return [
        engines.lookup(), engines.draft_model(models / "draft"), engines.eagle(models / "eagle"),
        engines.medusa(models / "medusa"),
    ]  # fmt: skip


def texts() -> list[list[int]]:
    draws = random.Random(8)
    return [[draws.randrange(12) for _ in range(draws.randrange(3, 60))] for _ in range(PROMPTS)]


def answers(models: Path, drafter: str, width: int) -> tuple[list[list[int]], int]:
    """Answer all prompts; return the answers, and how many proposals were verified."""

    def make(target: CachedModel, kv: KVPool) -> Sequence[TorchDrafter]:
        draft = DraftModelDrafter(CachedModel(models / "draft", 2, dtype=torch.float32, device=CPU), kv)
        return [
            SuffixDrafter(MatchLengths(1, 3)),
            draft,
            EagleDrafter(models / "eagle", 3, target, kv),
            MedusaDrafter(models / "medusa", target),
        ]

    harness = make_harness(
        models / "target", pool(models), make, draft_bytes=[0, 288, 96, 0], limits=SchedulerLimits(4, 80)
    )
    harness.loop.pin(3, drafter, width)
    for text in texts():
        harness.add(text, TOKENS)
    answered = [answer.tokens for answer in harness.finish().values()]
    return answered, harness.loop.state().drafters[drafter].verified


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "width"), ARMS)
def test_every_greedy_token_is_the_targets_best(models: Path, drafter: str, width: int) -> None:
    """Each token is the best one, given the tokens before it; `bench.teacher_forcing` tests a real model so."""
    model = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float64).eval()
    answered, verified = answers(models, drafter, width)
    assert verified > 0
    short = torch.cat([gaps(model, text, answer) for text, answer in zip(texts(), answered, strict=True)])
    assert len(short) == PROMPTS * TOKENS
    assert short.max() <= WORST_GAP
    assert (short == 0).double().mean() >= LEAST_BEST
