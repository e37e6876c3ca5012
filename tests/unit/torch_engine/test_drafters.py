"""Chains under the shared loop: whoever proposes, an answer is that of plain decoding, and no cache is led astray."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3.head import Head
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.batch_scheduler import SchedulerLimits
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, RequestStep, TorchDrafter
from outrider_runtime.torch_engine.drafts.draft_model_drafter import DraftModelDrafter
from outrider_runtime.torch_engine.drafts.eagle_drafter import EagleDrafter
from outrider_runtime.torch_engine.drafts.medusa_drafter import MedusaDrafter
from outrider_runtime.torch_engine.drafts.prompt_lookup_drafter import PromptLookupDrafter
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine import engines
from tests.unit.torch_engine.engines import (
    CPU,
    GREEDY,
    LONGEST,
    Letters,
    answers,
    bench,
    pool_of_three,
    same_as_fresh,
    texts,
)
from tests.unit.torch_engine.models import VOCABULARY, write_head, write_medusa, write_pair


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that is often right (the target with one weight changed a little), and a head."""
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder, 0.8)
    write_head(folder / "head")
    return folder


@pytest.mark.parametrize("drafter", ["pld", "draft", "eagle"])
def test_an_answer_is_the_same_whoever_proposes(
    models: Path, drafter: str, plain: list[list[int]], sampling: Sampling
) -> None:
    """Token for token, drawn answers too: a draw hangs on seed, place and token alone."""
    here = bench(models / "target", **pool_of_three(models))
    here.loop.pin(4, drafter)
    assert answers(here, sampling) == plain
    counts = here.loop.state().drafters[drafter]
    assert counts.tried > 0
    if drafter != "eagle":  # the head is random: it is seldom right
        assert counts.accepted > 0


def test_an_answer_is_the_same_while_drafters_change_and_memory_is_short(
    models: Path, plain: list[list[int]], sampling: Sampling
) -> None:
    """Another drafter and another length at every step, plain steps between, preemptions, drafters' KV taken away."""
    here = bench(models / "target", **pool_of_three(models), kv_tokens=LONGEST + 60, limits=SchedulerLimits(4, 20))
    draws = random.Random(4)
    pins = iter(lambda: (draws.choice([0, 1, 4]), draws.choice(["pld", "draft", "eagle"])), None)
    assert answers(here, sampling, lambda: here.loop.pin(*next(pins))) == plain
    assert here.engine.free_kv_bytes == here.engine._pool.total_bytes


def test_caches_are_those_of_a_fresh_prefill(models: Path) -> None:
    """Target's and draft's, at every step of a run in which drafters change."""
    made: list[Any] = []
    here = bench(models / "target", **pool_of_three(models, made))
    for text in texts(3):
        here.add(text, 30)
    draws = random.Random(6)
    ours = [here.engine._models.target]
    while here.engine.has_work:
        here.loop.pin(draws.choice([0, 2, 4]), draws.choice(["draft", "eagle", "pld"]))
        here.step()
        for model in (*ours, made[1].model):
            for request in here.engine.scheduler.running:
                same_as_fresh(model, request.name, request.tokens)


def test_a_draft_draws_as_its_target_where_both_think_alike(models: Path) -> None:
    """The target as its own draft, at temperature 1: with noise of its own it would be right only now and then."""

    def make(_target: CachedModel, pool: KVPool) -> list[TorchDrafter]:
        return [DraftModelDrafter(CachedModel(models / "target", 1, dtype=torch.float32, device=CPU), pool)]

    here = bench(models / "target", [engines.draft_model(models / "target")], make, draft_bytes=[288])
    here.loop.pin(4, "draft")
    answers(here, Sampling(seed=4, temperature=1.0, frequency_penalty=0.2))
    counts = here.loop.state().drafters["draft"]
    assert counts.accepted == counts.tried > 0


def test_a_drafter_that_raises_costs_nobody_an_answer(models: Path) -> None:
    plain = answers(bench(models / "target"), GREEDY)
    made: list[Any] = []
    here = bench(models / "target", **pool_of_three(models, made))
    made[1].propose = None  # calling it raises
    here.loop.pin(4, "draft")
    assert answers(here, GREEDY) == plain
    assert "TypeError" in here.loop.state().drafters["draft"].suspended


def test_a_lookup_proposes_what_followed_the_longest_match() -> None:
    def proposals(tokens: list[int], most: int = 3) -> list[int]:
        request = Request("r", tokens, len(tokens), Stops(9), GREEDY, Letters())
        ask = DraftTask(0, [True], most, width=2)
        tree = PromptLookupDrafter(2, 3).propose(CommittedStep([RequestStep(request, 0, 0, [0])], {}), ask)[0]
        assert tree.parents == list(range(-1, len(tree) - 1))
        return tree.tokens

    assert proposals([1, 2, 3, 7, 8, 9, 2, 3, 5, 1, 2, 3]) == [7, 8, 9]
    assert proposals([2, 3, 7, 8, 2, 3, 5, 4, 2, 3]) == [5, 4, 2]
    assert proposals([1, 2, 3, 4]) == []
    assert proposals([4, 4, 4]) == [4]
    assert proposals([VOCABULARY]) == []


def test_a_head_proposes_what_it_does_in_training(models: Path) -> None:
    """Against the head of examples/: fused states, rotations, its own states after the first."""
    made: list[Any] = []

    def make(target: CachedModel, pool: KVPool) -> list[TorchDrafter]:
        made.append(EagleDrafter(models / "head", 1, target, pool))
        return made

    here = bench(
        models / "target", [engines.eagle(models / "head")], make, draft_bytes=[384], limits=SchedulerLimits(4, 64)
    )  # fmt: skip
    here.loop.pin(4, "eagle")
    text = texts(1)[0]
    name = here.add(text, 30)
    here.step()
    (request,) = here.engine.scheduler.running
    assert request.name == name
    proposals = request.proposals.tokens
    assert len(proposals) == 4
    tensors = load_file(models / "head" / "model.safetensors")
    tensors.pop("t2d")
    offsets = tensors.pop("d2t")
    head = Head(AutoConfig.from_pretrained(models / "head"), offsets + torch.arange(len(offsets)))
    head.load_state_dict(tensors)
    target = AutoModelForCausalLM.from_pretrained(models / "target")
    tokens = torch.tensor([request.tokens + proposals])
    with torch.inference_mode():
        hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        fused = torch.cat(hidden[:3], -1)
        steps = [head.lm_head(states[0, -1]) for states in head.unroll(target.model.embed_tokens, tokens, fused, 4)]
    assert proposals == [int(head.vocabulary[one.argmax()]) for one in steps]


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("d2t", torch.full((VOCABULARY // 2,), VOCABULARY), f"d2t names token {VOCABULARY}, and the target has"),
        ("d2t", torch.full((VOCABULARY // 2,), -50), "d2t names token -50"), ("d2t", None, "no tensor d2t"),
    ],
)  # fmt: skip
def test_a_head_whose_tokens_are_not_the_targets_is_refused(
    models: Path, tmp_path: Path, name: str, value: torch.Tensor | None, named: str
) -> None:
    """Bug: the target had no row for what it proposed, and the engine ended for everybody."""
    with pytest.raises(UnsupportedModelError, match=named):
        EagleDrafter(changed(models / "head", tmp_path / "head", name, value), 1, *target_and_pool(models))


def test_medusa_heads_whose_tokens_are_not_the_targets_are_refused(models: Path, tmp_path: Path) -> None:
    write_medusa(tmp_path / "whole")
    value = torch.arange(1, VOCABULARY + 1, 2, dtype=torch.int32)
    value[-1] = VOCABULARY
    with pytest.raises(UnsupportedModelError, match=f"vocabulary names token {VOCABULARY}"):
        MedusaDrafter(changed(tmp_path / "whole", tmp_path / "heads", "vocabulary", value), target_and_pool(models)[0])


def target_and_pool(models: Path) -> tuple[CachedModel, KVPool]:
    target = CachedModel(models / "target", 0, dtype=torch.float32, device=CPU)
    return target, KVPool(1 << 20, [target.cache.bytes_per_token])


def changed(source: Path, folder: Path, name: str, value: torch.Tensor | None) -> Path:
    """A copy with another tensor of that name, or with none."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors if value is None else {**tensors, name: value}, folder / "model.safetensors")
    return folder
