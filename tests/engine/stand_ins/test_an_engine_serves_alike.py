"""A whole engine on our stand-ins, and the same engine wholly interpreted: real requests, a real pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.vllm_plugin.messages import DraftOrder

from tests.engine.engines import POOR_DRAFT, draft_model, eagle, lookup, sparse_self
from tests.engine.ordered import Giver, OrderedBench, ordered
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


MOST = 3
SELF = sparse_self(64)


@pytest.fixture(scope="module")
def engine() -> Iterator[OrderedBench]:
    with ordered([lookup(), eagle(), draft_model(POOR_DRAFT), SELF], extra=["--block-size=32"]) as started:
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


def alone(member: int | None) -> Giver:
    """Drafter that proposes for every request; None: no drafter."""

    def give(_step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
        if member is None:
            return order
        order.passes[member], order.chosen[:] = MOST, member
        return order._replace(draft_tokens=MOST)

    return give


def fed_then_short(step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
    """Each member in turn: its first pass alone at K = 0, then K below the most, twice."""
    turn, tokens = step // 3, (0, MOST - 1, 1)[step % 3]
    member = turn % len(order.passes)
    order.passes[member] = tokens
    order.chosen[:] = member if tokens else NO_DRAFTER
    return order._replace(draft_tokens=tokens)


def test_nothing_is_interpreted_in_a_serving_step(engine: OrderedBench, launches: Counter[str]) -> None:
    """Promise: no request makes a step take a thousand times as long, with or without drafts, whatever it asks for."""
    requests = [(prompt, {**kind, "max_tokens": 6}) for prompt in PROMPTS for kind in KINDS.values()]
    for member in (None, *range(len(engine.names))):
        engine.run(requests, alone(member))
        assert member is None or engine.proposed(member)
        assert not launches, engine.names[member or 0]


def test_interpreted_engine_answers_the_same(engine: OrderedBench, launches: Counter[str]) -> None:
    """Promise: what the stand-ins are tested for kernel by kernel holds for the whole, for each method. No member is
    said to have failed, whatever lies in the columns that K leaves unused."""
    requests = [(PROMPTS[1], {}), (PROMPTS[0], KINDS["seeded"])]
    with interpreted():
        answers = engine.run(requests, fed_then_short)
    assert launches["_prepare_pos_seq_lens_kernel"] > 0
    came = engine.orders_and_reports
    assert engine.run(requests, fed_then_short) == answers
    assert not any(report.failures for _, report in came)
    fed = [report for order, report in came if not order.draft_tokens and order.passes.max() == 0]
    assert all(np.isfinite(report.seconds).any() and not report.proposed.any() for report in fed)
    for member in range(len(engine.names)):
        assert any((report.proposer == member).any() for _, report in came), engine.names[member]
