"""Chains under the control loop: with every drafter an answer equals plain decoding, and all KV caches stay right."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_crds.draft_pool import SuffixScope
from outrider_runtime.drafters.kept_answers import kept_answers
from outrider_runtime.drafters.suffix import MatchLengths
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.batch_scheduler import SchedulerLimits
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, RequestStep, TorchDrafter
from outrider_runtime.torch_engine.drafts.draft_model_drafter import DraftModelDrafter
from outrider_runtime.torch_engine.drafts.eagle_drafter import EagleDrafter
from outrider_runtime.torch_engine.drafts.medusa_drafter import MedusaDrafter
from outrider_runtime.torch_engine.drafts.suffix_drafter import SuffixDrafter
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
    assert_same_as_fresh,
    make_harness,
    pool_of_three,
    texts,
)
from tests.unit.torch_engine.models import VOCABULARY, write_head, write_medusa, write_pair
from training.eagle3.head import Head


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that is often right (the target with one weight changed a little), and a head."""
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder, 0.8)
    write_head(folder / "head")
    return folder


@pytest.mark.parametrize("drafter", ["pld", "draft", "eagle"])
def test_answer_with_each_drafter_equals_plain(
    models: Path, drafter: str, plain: list[list[int]], sampling: Sampling
) -> None:
    """Equal token for token, for sampled answers too: a draw depends on seed, place and token only."""
    harness = make_harness(models / "target", **pool_of_three(models))
    harness.loop.pin(4, drafter)
    assert answers(harness, sampling) == plain
    counts = harness.loop.state().drafters[drafter]
    assert counts.tried > 0
    if drafter != "eagle":  # the head is random: it is seldom right
        assert counts.accepted > 0


def test_answer_with_changing_drafters_equals_plain(models: Path, plain: list[list[int]], sampling: Sampling) -> None:
    """Drafter and draft length change at every step, some steps are plain, requests are preempted, drafters lose KV."""
    harness = make_harness(
        models / "target", **pool_of_three(models), kv_tokens=LONGEST + 60, limits=SchedulerLimits(4, 20)
    )
    draws = random.Random(4)
    pins = iter(lambda: (draws.choice([0, 1, 4]), draws.choice(["pld", "draft", "eagle"])), None)
    assert answers(harness, sampling, lambda: harness.loop.pin(*next(pins))) == plain
    assert harness.engine.free_kv_bytes == harness.engine._pool.total_bytes


def test_kv_caches_equal_fresh_prefill(models: Path) -> None:
    """Holds for target and draft model at every step of a run in which drafters change."""
    drafters: list[Any] = []
    harness = make_harness(models / "target", **pool_of_three(models, drafters))
    for text in texts(3):
        harness.add(text, 30)
    draws = random.Random(6)
    models_of_engine = [harness.engine._models.target]
    while harness.engine.has_work:
        harness.loop.pin(draws.choice([0, 2, 4]), draws.choice(["draft", "eagle", "pld"]))
        harness.step()
        for model in (*models_of_engine, drafters[1].model):
            for request in harness.engine.scheduler.running:
                assert_same_as_fresh(model, request.name, request.tokens)


def test_draft_equal_to_target_is_always_accepted(models: Path) -> None:
    """The target is its own draft, at temperature 1: with independent noise it would rarely be accepted."""

    def make(_target: CachedModel, pool: KVPool) -> list[TorchDrafter]:
        return [DraftModelDrafter(CachedModel(models / "target", 1, dtype=torch.float32, device=CPU), pool)]

    harness = make_harness(models / "target", [engines.draft_model(models / "target")], make, draft_bytes=[288])
    harness.loop.pin(4, "draft")
    answers(harness, Sampling(seed=4, temperature=1.0, frequency_penalty=0.2))
    counts = harness.loop.state().drafters["draft"]
    assert counts.accepted == counts.tried > 0


@pytest.mark.slow
def test_drafter_that_raises_is_suspended_and_answers_go_on(models: Path) -> None:
    plain = answers(make_harness(models / "target"), GREEDY)
    drafters: list[Any] = []
    harness = make_harness(models / "target", **pool_of_three(models, drafters))
    drafters[1].propose = None  # calling it raises
    harness.loop.pin(4, "draft")
    assert answers(harness, GREEDY) == plain
    assert "TypeError" in harness.loop.state().drafters["draft"].suspended


@pytest.mark.parametrize(
    ("scope", "tenants", "is_shared"),
    [
        (SuffixScope.SERVICE, (None, None), True),
        (SuffixScope.TENANT, ("a", "a"), True),
        (SuffixScope.TENANT, ("a", "b"), False),
        (SuffixScope.TENANT, (None, None), False),
        (SuffixScope.REQUEST, ("a", "a"), False),
    ],
)
def test_answer_speeds_up_requests_of_its_scope_alone(
    models: Path, scope: SuffixScope, tenants: tuple[str | None, str | None], is_shared: bool
) -> None:
    """A second request takes fewer steps, and gets the same answer."""
    spec = engines.suffix(scope=scope)
    drafter = SuffixDrafter(MatchLengths(1, 16), kept_answers(spec))
    harness = make_harness(models / "target", [spec], lambda _target, _pool: [drafter], draft_bytes=[1])
    harness.loop.pin(4, spec.name)
    steps, answers = list[int](), list[list[int]]()
    for tenant in tenants:
        name, count = harness.add(texts()[0], 60, tenant=tenant), 0
        while harness.engine.has_work:
            harness.step()
            count += 1
        steps.append(count)
        answers.append(harness.answers[name].tokens)
    assert answers[0] == answers[1]
    assert (steps[1] < steps[0]) == is_shared


def test_lookup_proposes_what_followed_longest_match() -> None:
    def proposals(tokens: list[int], depth: int = 3) -> list[int]:
        request = Request("r", tokens, len(tokens), Stops(9), GREEDY, Letters())
        task = DraftTask(0, [True], depth, width=2)
        tree = SuffixDrafter(MatchLengths(2, 3)).propose(CommittedStep([RequestStep(request, 0, 0, [0])], {}), task)[0]
        assert tree.parents == list(range(-1, len(tree) - 1))
        return tree.tokens

    assert proposals([1, 2, 3, 7, 8, 9, 2, 3, 5, 1, 2, 3]) == [7, 8, 9]
    assert proposals([2, 3, 7, 8, 2, 3, 5, 4, 2, 3]) == [5, 4, 2]
    assert proposals([1, 2, 3, 4]) == []
    assert proposals([4, 4, 4]) == [4, 4, 4], "a text that repeats goes on"
    assert proposals([VOCABULARY]) == []


def test_eagle_head_proposes_as_in_training(models: Path) -> None:
    """The reference is training.eagle3's head: fused states, rotations, and its own states after the first token."""
    drafters: list[Any] = []

    def make(target: CachedModel, pool: KVPool) -> list[TorchDrafter]:
        drafters.append(EagleDrafter(models / "head", 1, target, pool))
        return drafters

    harness = make_harness(
        models / "target", [engines.eagle(models / "head")], make, draft_bytes=[384], limits=SchedulerLimits(4, 64)
    )  # fmt: skip
    harness.loop.pin(4, "eagle")
    text = texts(1)[0]
    name = harness.add(text, 30)
    harness.step()
    (request,) = harness.engine.scheduler.running
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
    assert proposals == [int(head.vocabulary[logits.argmax()]) for logits in steps]


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("d2t", torch.full((VOCABULARY // 2,), VOCABULARY), f"d2t names token {VOCABULARY}, and the target has"),
        ("d2t", torch.full((VOCABULARY // 2,), -50), "d2t names token -50"), ("d2t", None, "no tensor d2t"),
    ],
)  # fmt: skip
def test_eagle_head_with_foreign_tokens_is_refused(
    models: Path, tmp_path: Path, name: str, value: torch.Tensor | None, named: str
) -> None:
    """Bug: the target's embedding had no row for a proposed token, and the engine stopped."""
    with pytest.raises(UnsupportedModelError, match=named):
        EagleDrafter(changed(models / "head", tmp_path / "head", name, value), 1, *target_and_pool(models))


def test_medusa_heads_with_foreign_tokens_are_refused(models: Path, tmp_path: Path) -> None:
    write_medusa(tmp_path / "whole")
    value = torch.arange(1, VOCABULARY + 1, 2, dtype=torch.int32)
    value[-1] = VOCABULARY
    with pytest.raises(UnsupportedModelError, match=f"vocabulary names token {VOCABULARY}"):
        MedusaDrafter(changed(tmp_path / "whole", tmp_path / "heads", "vocabulary", value), target_and_pool(models)[0])


def target_and_pool(models: Path) -> tuple[CachedModel, KVPool]:
    target = CachedModel(models / "target", 0, dtype=torch.float32, device=CPU)
    return target, KVPool(1 << 20, [target.cache.bytes_per_token])


def changed(source: Path, folder: Path, name: str, value: torch.Tensor | None) -> Path:
    """Copy a model's folder with another tensor of that name, or without it."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors if value is None else {**tensors, name: value}, folder / "model.safetensors")
    return folder
