"""Requests without a seed: chains are drawn from the draft's distribution, and answers follow the target's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_runtime.control.plans import ROOT
from outrider_runtime.torch_engine import target_pass
from outrider_runtime.torch_engine.drafting import TorchDrafter
from outrider_runtime.torch_engine.drafts.draft_model_drafter import DraftModelDrafter
from outrider_runtime.torch_engine.engine_request import Sampling
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel
from outrider_runtime.torch_engine.rejection import Chain
from outrider_runtime.torch_engine.tree import Tree, chain, merge
from transformers import AutoModelForCausalLM

from tests.engine import engines
from tests.unit.torch_engine.engines import CPU, make_harness
from tests.unit.torch_engine.models import write_model

PROMPT = [3, 1, 4, 1, 5]
TOKENS, BINS = 4, 20
TEMPERATURE, TOP_P = 0.9, 0.95


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft of whose proposals about half are accepted."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "target", model_type="llama", initializer_range=0.15)
    draft = write_model(folder / "draft", model_type="llama", initializer_range=0.15)
    with torch.no_grad():
        draft.model.layers[2].mlp.down_proj.weight.mul_(0.2)
    draft.save_pretrained(folder / "draft")
    return folder


def drawn_answers(models: Path, requests: int) -> tuple[list[list[int]], Any]:
    """Answer requests without a seed while the draft proposes chains; return the answers and the loop's counts."""

    def make(_target: CachedModel, pool: KVPool) -> list[TorchDrafter]:
        return [DraftModelDrafter(CachedModel(models / "draft", 1, dtype=torch.float32, device=CPU), pool)]

    harness = make_harness(models / "target", [engines.draft_model(models / "draft")], make, draft_bytes=[288])
    harness.loop.pin(3, "draft")
    for seed in range(requests):
        harness.add(PROMPT, TOKENS, Sampling(seed, is_seeded=False, temperature=TEMPERATURE, top_p=TOP_P))
    while harness.engine.has_work:
        harness.step()
        for request in harness.engine.scheduler.running:
            assert len(request.proposals.drawn_from) == len(request.proposals)
            assert all(map(math.isnan, request.proposals.confidences))
    assert harness.loop.failures == 0
    return [answer.tokens for answer in harness.answers.values()], harness.loop.state().drafters["draft"]


def p_value(models: Path, answers: Sequence[Sequence[int]]) -> float:
    """Chi-square test of whether each token was drawn from the model's distribution, given the tokens before it.

    The token's place in that distribution, the most probable tokens first, is then uniform in (0, 1).
    """
    target = AutoModelForCausalLM.from_pretrained(models / "target").eval()
    with torch.inference_mode():
        logits = (
            target(torch.tensor([[*PROMPT, *answer] for answer in answers])).logits[:, len(PROMPT) - 1 : -1].double()
        )
    ordered, tokens = (logits / TEMPERATURE).softmax(-1).sort(descending=True)  # (requests, 4, V)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < TOP_P, ordered, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    rank = (tokens == torch.tensor(answers)[:, :, None]).double().argmax(-1, keepdim=True)
    own, before = kept.gather(-1, rank), (kept.cumsum(-1) - kept).gather(-1, rank)
    if not own.all():  # left out by top-p
        return 0.0
    places = before + own * torch.rand(own.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    counts = torch.histc(places.flatten(), BINS, 0, 1)
    expected = places.numel() / BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2).double(), statistic / 2))


@pytest.mark.slow
def test_answers_follow_target_distribution(models: Path) -> None:
    """Covers the whole engine: proposals under the loop, verified one step later, cut at the end of the answer."""
    answers, counts = drawn_answers(models, 800)
    assert 0.2 < counts.accepted / counts.tried < 0.95
    assert p_value(models, answers) > 1e-3


@pytest.mark.slow
def test_accepting_every_proposal_is_detected(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting all proposals breaks the distribution, so the test above can fail."""

    def keep(chains: Sequence[Chain], _weights: object, _rows: object, tokens: Sequence[int]) -> list[int]:
        kept = list(tokens)
        for proposed in chains:
            kept[proposed.row : proposed.row + len(proposed.tokens)] = proposed.tokens
        return kept

    monkeypatch.setattr(target_pass, "judge", keep)
    answers, _ = drawn_answers(models, 200)
    assert p_value(models, answers) < 1e-6


def test_drawn_chain_keeps_distribution_only_when_alone() -> None:
    """Rejection sampling needs the draft's distribution, which is no longer valid once another drafter's nodes join."""
    drawn = chain([5, 6, 7], 1, math.nan)
    drawn.drawn_from = ["q5", "q6", "q7"]
    assert merge([Tree(), drawn]).drawn_from == ["q5", "q6", "q7"]
    assert drawn.within(2).drawn_from == ["q5", "q6"]
    both = merge([chain([5, 8], 0, 2.0), drawn])
    assert not both.drawn_from
    assert both.parents == [ROOT, 0, 0, 2]
    assert not merge([drawn, chain([5], 0, 2.0)]).drawn_from, "not even if both propose the same token"
