"""A whole engine on our stand-ins, and the same engine wholly interpreted: real requests, a real pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.engines import POOR_DRAFT, Bench, bench, draft_model, eagle, lookup
from tests.engine.stand_ins.interpreted import interpreted

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
PROMPTS = (
    "The capital of France is",
    "one two three four five six one two three four five six one two three",
    "The old lighthouse keeper counted the waves: one, two, three, four, one, two. " * 30 + "Then he",  # in chunks
)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3},
    "top_p and top_k": {"temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 40},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "log-probabilities": {"logprobs": 3},
    "bad words": {"bad_words": ["Paris"], "min_tokens": 4},
    "logit_bias": {"logit_bias": {5: 3.0}},
    "min_p": {"temperature": 0.8, "seed": 5, "min_p": 0.1},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Bench]:
    with bench([lookup(), eagle(), draft_model(POOR_DRAFT)]) as started:
        yield started


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels that were interpreted, and how often."""
    from triton.runtime import interpreter

    seen, run = Counter[str](), interpreter.GridExecutor.__call__

    def counted(executor: Any, *arguments: Any, **named: Any) -> Any:
        seen[executor.fn.__name__] += 1
        return run(executor, *arguments, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    return seen


def drafters(engine: Bench) -> list[str]:
    return [drafter.name for drafter in engine.plan.pool.hosted]


def test_nothing_is_interpreted_in_a_serving_step(engine: Bench, launches: Counter[str]) -> None:
    """Promise: no request makes a step take a thousand times as long, with or without drafts, whatever it asks for."""
    for drafter in [None, *drafters(engine)]:
        engine.fresh()
        engine.loop.pin(3 if drafter else 0, drafter)
        engine.run([(prompt, {**kind, "max_tokens": 6}) for prompt in PROMPTS for kind in KINDS.values()])
        assert not launches, drafter


def test_an_engine_that_is_wholly_interpreted_answers_the_same(engine: Bench, launches: Counter[str]) -> None:
    """Promise: what the stand-ins are tested for kernel by kernel holds for the whole."""
    for drafter in drafters(engine):
        answers = []
        for how in (interpreted, None):
            engine.fresh()
            engine.loop.pin(2, drafter)
            requests = [(PROMPTS[1], {"max_tokens": 5}), (PROMPTS[0], {**KINDS["seeded"], "max_tokens": 5})]
            if how is None:
                answers.append(engine.run(requests))
            else:
                with how():
                    answers.append(engine.run(requests))
        assert answers[0] == answers[1], drafter
    assert launches["_prepare_pos_seq_lens_kernel"] > 0
