"""The engine without a drafter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from outrider_runtime.torch_engine.batch_scheduler import SchedulerLimits
from outrider_runtime.torch_engine.commit import FinishReason
from outrider_runtime.torch_engine.engine_request import Sampling
from transformers import PreTrainedModel

from tests.unit.torch_engine.engines import LONGEST, make_harness
from tests.unit.torch_engine.models import VOCABULARY, write_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("target")
    return folder, write_model(folder, model_type="llama")


def prompts(count: int, seed: int = 3) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(VOCABULARY) for _ in range(draws.randrange(1, 90))] for _ in range(count)]


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    made = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer


@pytest.mark.slow
def test_greedy_answers_equal_transformers(target: tuple[Path, PreTrainedModel]) -> None:
    """Seven requests, four at once, with prefill chunks in the same steps as decodes."""
    folder, model = target
    harness = make_harness(folder)
    expected = {harness.add(prompt): greedy(model, prompt, 20) for prompt in prompts(7)}
    answers = harness.finish()
    assert {name: answer.tokens for name, answer in answers.items()} == expected
    assert all(answer.finish is FinishReason.LENGTH for answer in answers.values())


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), pytest.param(Sampling(seed=7, temperature=0.9, top_p=0.9), marks=pytest.mark.slow)],
)
def test_answer_does_not_depend_on_memory_or_neighbours(
    target: tuple[Path, PreTrainedModel], sampling: Sampling
) -> None:
    """An answer is the same alone with a large budget, and among others with little memory and preemptions."""
    folder, _ = target
    texts = prompts(5)
    alone = []
    for text in texts:
        harness = make_harness(folder, limits=SchedulerLimits(1, 512))
        harness.add(text, 60, sampling)
        alone.append(harness.finish()["r0"].tokens)
    short = make_harness(folder, kv_tokens=LONGEST + 8, limits=SchedulerLimits(4, 24))
    for text in texts:
        short.add(text, 60, sampling)
    were_preempted = False
    while short.engine.has_work:
        short.step()
        were_preempted |= any(request.was_preempted for request in short.engine.scheduler.waiting)
    assert [request.tokens for request in short.answers.values()] == alone
    assert were_preempted
    assert short.engine.free_kv_bytes == short.engine._pool.total_bytes


def test_abort_frees_memory_at_once(target: tuple[Path, PreTrainedModel]) -> None:
    harness = make_harness(target[0])
    first, second = harness.add([1, 2, 3], 100), harness.add([4] * 80, 100)
    harness.step()
    before = harness.engine.free_kv_bytes
    harness.engine.abort(second)
    assert harness.engine.free_kv_bytes > before
    harness.engine.abort(second)  # twice, and one that never was
    harness.engine.abort("unknown")
    assert len(harness.finish()[first].tokens) == 100


def test_answer_ends_at_longest_context(target: tuple[Path, PreTrainedModel]) -> None:
    harness = make_harness(target[0])
    name = harness.add([5] * 190, 100)
    assert len(harness.finish()[name].tokens) == LONGEST - 190


def test_logprobs_are_those_before_temperature_and_bias(target: tuple[Path, PreTrainedModel]) -> None:
    folder, model = target
    harness = make_harness(folder)
    prompt = prompts(1)[0]
    name = harness.add(prompt, 8, Sampling(seed=3, temperature=0.7, logprobs=3, logit_bias={5: 2.0}))
    answer = harness.finish()[name]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert len(answer.logprobs) == 8
    for row, token, reported in zip(expected, answer.tokens, answer.logprobs, strict=True):
        assert reported.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert list(reported.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert reported.rank == 1 + int((row > row[token]).sum())


def test_logit_bias_forces_and_forbids_tokens(target: tuple[Path, PreTrainedModel]) -> None:
    harness = make_harness(target[0])
    always, never = harness.add([1], 6, Sampling(temperature=0.0, logit_bias={7: 1000.0})), harness.add([1], 6)
    answers = harness.finish()
    assert answers[always].tokens == [7] * 6
    first = answers[never].tokens[0]
    harness = make_harness(target[0])
    other = harness.add([1], 6, Sampling(temperature=0.0, logit_bias={first: -1000.0}))
    assert first not in harness.finish()[other].tokens


def test_presence_penalty_prevents_repetition(target: tuple[Path, PreTrainedModel]) -> None:
    """The presence penalty is larger than any logit, so no token occurs twice."""
    harness = make_harness(target[0])
    name = harness.add([1], 60, Sampling(temperature=0.0, presence_penalty=1000.0))
    tokens = harness.finish()[name].tokens
    assert len(set(tokens)) == len(tokens)
