"""Requests through the engine without a drafter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from outrider_runtime.torch_engine.batch_scheduler import SchedulerLimits
from outrider_runtime.torch_engine.commit import FinishReason
from outrider_runtime.torch_engine.engine_request import Sampling
from transformers import PreTrainedModel

from tests.unit.torch_engine.engines import LONGEST, bench
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


def test_answers_are_those_of_transformers(target: tuple[Path, PreTrainedModel]) -> None:
    """Seven requests, four at once, prompts in chunks beside answers."""
    folder, model = target
    here = bench(folder)
    wanted = {here.add(prompt): greedy(model, prompt, 20) for prompt in prompts(7)}
    answers = here.finish()
    assert {name: one.tokens for name, one in answers.items()} == wanted
    assert all(one.finish is FinishReason.LENGTH for one in answers.values())


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), pytest.param(Sampling(seed=7, temperature=0.9, top_p=0.9), marks=pytest.mark.slow)],
)
def test_an_answer_does_not_hang_on_memory_or_neighbours(
    target: tuple[Path, PreTrainedModel], sampling: Sampling
) -> None:
    """Alone with a large budget, and among others where memory is short and requests are preempted."""
    folder, _ = target
    texts = prompts(5)
    alone = []
    for text in texts:
        here = bench(folder, limits=SchedulerLimits(1, 512))
        here.add(text, 60, sampling)
        alone.append(here.finish()["r0"].tokens)
    short = bench(folder, kv_tokens=LONGEST + 8, limits=SchedulerLimits(4, 24))
    for text in texts:
        short.add(text, 60, sampling)
    were_preempted = False
    while short.engine.has_work:
        short.step()
        were_preempted |= any(one.was_preempted for one in short.engine.scheduler.waiting)
    assert [one.tokens for one in short.answers.values()] == alone
    assert were_preempted
    assert short.engine.free_kv_bytes == short.engine._pool.total_bytes


def test_memory_of_a_client_that_left_is_free_at_once(target: tuple[Path, PreTrainedModel]) -> None:
    here = bench(target[0])
    first, second = here.add([1, 2, 3], 100), here.add([4] * 80, 100)
    here.step()
    before = here.engine.free_kv_bytes
    here.engine.abort(second)
    assert here.engine.free_kv_bytes > before
    here.engine.abort(second)  # twice, and one that never was
    here.engine.abort("nobody")
    assert len(here.finish()[first].tokens) == 100


def test_an_answer_ends_where_the_model_does(target: tuple[Path, PreTrainedModel]) -> None:
    here = bench(target[0])
    name = here.add([5] * 190, 100)
    assert len(here.finish()[name].tokens) == LONGEST - 190


def test_logprobs_are_the_models_own_before_temperature(target: tuple[Path, PreTrainedModel]) -> None:
    folder, model = target
    here = bench(folder)
    prompt = prompts(1)[0]
    name = here.add(prompt, 8, Sampling(seed=3, temperature=0.7, logprobs=3, logit_bias={5: 2.0}))
    answer = here.finish()[name]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1)
    assert len(answer.logprobs) == 8
    for row, token, told in zip(wanted, answer.tokens, answer.logprobs, strict=True):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert list(told.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert told.rank == 1 + int((row > row[token]).sum())


def test_a_biased_token_is_drawn(target: tuple[Path, PreTrainedModel]) -> None:
    here = bench(target[0])
    always, never = here.add([1], 6, Sampling(temperature=0.0, logit_bias={7: 1000.0})), here.add([1], 6)
    answers = here.finish()
    assert answers[always].tokens == [7] * 6
    first = answers[never].tokens[0]
    here = bench(target[0])
    other = here.add([1], 6, Sampling(temperature=0.0, logit_bias={first: -1000.0}))
    assert first not in here.finish()[other].tokens


def test_penalties_keep_a_token_from_coming_again(target: tuple[Path, PreTrainedModel]) -> None:
    """A presence penalty that nothing outweighs: no token comes twice."""
    here = bench(target[0])
    name = here.add([1], 60, Sampling(temperature=0.0, presence_penalty=1000.0))
    tokens = here.finish()[name].tokens
    assert len(set(tokens)) == len(tokens)
