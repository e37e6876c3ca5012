"""Asynchronous scheduling, as on GPUs, with every method: a step is scheduled before the tokens of the last are known.

Real vLLM in this process; planted models, as answers need only stay the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from outrider_crds.draft_pool import DraftMethod

from tests.engine.engines import Bench, bench, draft_model, eagle, lookup
from tests.engine.planted_models import Counting
from tests.engine.test_lossless_speculation import SHORT, state_of

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=["EAGLE-3 and prompt lookup", "draft model and prompt lookup"])
def running(models: Counting, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The draft model is the target itself, so that its proposals are accepted."""
    neural = eagle(models.head) if request.param.startswith("EAGLE") else draft_model(models.target)
    with bench([lookup(), neural], asynchronous=True, target=models.target) as started:
        yield started


@pytest.fixture
def engine(running: Bench) -> Bench:
    running.fresh()
    return running


@pytest.fixture
def reference(engine: Bench) -> list[list[int]]:
    engine.loop.pin(0)
    plain = engine.generate(SHORT)
    engine.fresh()
    return plain


def test_draft_length_that_changes_each_step_loses_nothing(engine: Bench, reference: list[list[int]]) -> None:
    """Bugs: at K = 0 the padding of a draft that ran, and at a later K the padding behind it, was taken for nonsense,
    and a good drafter was suspended for minutes."""
    assert type(engine.scheduler).__name__ == "OutriderAsyncScheduler"
    for drafter in (member.name for member in engine.plan.pool.hosted):
        engine.fresh()
        lengths = itertools.cycle((0, 3, 1, 0, 0, 2, 3))
        tokens = engine.run(
            [(prompt, {}) for prompt in SHORT],
            arrive_every=2,
            before_step=lambda _step, name=drafter, cycle=lengths: engine.loop.pin(next(cycle), name),
        )
        assert tokens == reference, drafter
        assert engine.verified(drafter) > 0
        assert not state_of(engine, drafter).reason


def test_request_ends_at_the_length_limit_and_others_go_on(engine: Bench, reference: list[list[int]]) -> None:
    """Bug: places for K proposals were scheduled behind the limit, and the engine died of an index out of range."""
    tokenizer = engine.llm.get_tokenizer()
    limit = int(engine.plan.boot.engine.extra_args[0].partition("=")[2])
    near = tokenizer.decode(tokenizer.encode("word " * limit)[: limit - 12])
    for drafter in (member.name for member in engine.plan.pool.hosted):
        engine.loop.pin(3, drafter)
        near_tokens, other = engine.run([(near, {"max_tokens": 40}), (SHORT[1], {})])
        assert other == reference[1]
        assert 0 < len(near_tokens) < 40, "it reached the limit"


def test_drafter_that_takes_turns_with_a_lookup_proposes(engine: Bench, reference: list[list[int]]) -> None:
    """Bug: the tokens of the step under way are unknown to the host while a lookup's proposals are verified, and a
    draft model's gap was not filled then: it never proposed again."""
    first, drafter = engine.plan.pool.hosted
    turns = itertools.cycle((first.name, first.name, drafter.name))
    tokens = engine.run([(prompt, {}) for prompt in SHORT], before_step=lambda _step: engine.loop.pin(3, next(turns)))
    assert tokens == reference
    assert engine.accepted(drafter.name) > 0
    if drafter.method is DraftMethod.DRAFT_MODEL:  # a head fills no gap
        assert engine.loop.caught_up_tokens > 0
        assert engine.accepted(drafter.name) == engine.verified(drafter.name), "it is the target itself"


def test_draft_report_arrives_a_step_later(engine: Bench) -> None:
    """Bug: the draft's time was part of the target's, so that a draft that slowed down was never found out."""
    drafter = engine.plan.pool.hosted[-1].name
    engine.loop.pin(2, drafter)
    engine.generate(SHORT[:2])
    steps = [step.outcome for step in engine.steps if math.isfinite(step.outcome.step_s)]
    number = engine.loop.numbers[drafter]
    assert sum(step.draft_s[number] > 0 for step in steps) >= len(steps) - 1
    assert all(step.target_s > 0 for step in steps)
    outcomes = [member for member in engine.outcomes if member.drafter == drafter]
    assert all(member.accepted <= member.verified <= member.proposed <= member.planned_tokens for member in outcomes)
    assert engine.accepted(drafter) > 0


def test_pages_of_a_broken_request_are_clean_for_the_next(engine: Bench, reference: list[list[int]]) -> None:
    """Bug: a client left while a step with NaN ran. Another request got the pages before that step was reported, and
    computed NaN, too. The few pages that are free go round."""

    def spoil(_layer: Any, _inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return output[0] * math.nan, output[1]

    blocks = engine.scheduler.kv_cache_manager.block_pool
    layer = engine.runner.model.model.layers[0].self_attn.qkv_proj
    engine.loop.pin(0)
    reserved = blocks.get_new_blocks(blocks.get_num_free_blocks() - 4)
    hook = layer.register_forward_hook(spoil)
    try:
        _, tokens = engine.run(
            [(SHORT[1], {}), (SHORT[0], {})],
            arrive_every=1,
            abort_at={1: "0"},
            before_step=lambda step: hook.remove() if step == 1 else None,
        )
    finally:
        hook.remove()
        blocks.free_blocks(reserved)
    assert tokens == reference[0]
    assert engine.scheduler._broken.count == 0


def test_a_drafter_that_raises_costs_its_proposals_only(engine: Bench, reference: list[list[int]]) -> None:
    drafter = engine.plan.pool.hosted[-1].name
    engine.loop.pin(2, drafter)

    def fail(*_arguments: object, **_keywords: object) -> None:
        raise RuntimeError("the draft fell over")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner.speculator._members[engine.loop.numbers[drafter]], "propose", fail)
        assert engine.generate(SHORT) == reference
    assert "the draft fell over" in state_of(engine, drafter).reason
    engine.loop.resume(drafter)


def test_grammar_bound_and_sampled_requests_share_the_batch(engine: Bench) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    engine.loop.pin(3, engine.plan.pool.hosted[0].name)
    digits = {"structured_outputs": StructuredOutputsParams(regex="(1 2 3 ){4}"), "ignore_eos": False}
    sampled = {"temperature": 1.0, "top_k": 1, "logprobs": 2, "presence_penalty": 0.0}
    rows = engine.run([("1 2 3 1 2 3 1 2 3 ", digits), (SHORT[0], {}), (SHORT[0], sampled)])
    text = engine.llm.get_tokenizer().decode(rows[0], skip_special_tokens=True)
    assert text.strip() == "1 2 3 1 2 3 1 2 3 1 2 3"
    assert rows[1] == rows[2]
