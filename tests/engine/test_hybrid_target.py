"""A target with layers that keep a state (Qwen3-Next: linear attention) and others that attend: what drafts for it.

Apart from other engines: vLLM makes the process group of a mixture of experts only where no engine runs yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import planted_models
from tests.engine.engines import block, draft_model, lookup, mtp
from tests.engine.ordered import OrderedBench, ordered
from tests.engine.planted_models import Counting
from tests.engine.test_block_drafts import (
    IN_CHUNKS,
    PROMPTS,
    alone,
    assert_preempted_requests_answer_alike,
    by_turns,
    everything,
    idle,
    strays,
)

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
RECURRENT = (1, 2, 4)
"""Layers that keep a state."""
IN_16_BITS = ("--dtype=bfloat16",)
"""vLLM's kernels for such layers take nothing else on a CPU."""


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return planted_models.qwen3_next(folder / "hybrid", recurrent=RECURRENT)


@pytest.fixture(scope="module")
def engine(folder: Path, models: Counting, target: Path) -> Iterator[OrderedBench]:
    flash, draft = planted_models.dflash(folder / "dflash"), models.draft
    pool = [lookup(), mtp(), block(flash, "dflash"), draft_model(draft)]
    with ordered(pool, target=target, extra=(*IN_16_BITS, *IN_CHUNKS)) as started:
        yield started


def test_pool_on_hybrid_target_is_lossless(engine: OrderedBench) -> None:
    """A rejected token must leave no trace in the state of the target's layers, whatever the draft length."""
    assert len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1
    assert not engine.failures
    reference = engine.run(PROMPTS, idle)
    for give in (everything, by_turns, *(alone(member) for member in range(4))):
        assert engine.run(PROMPTS, give, arrive_every=2) == reference
        assert all(not report.failures for _, report in engine.orders_and_reports)
    engine.run(PROMPTS, everything)
    assert all(engine.proposed(member) for member in range(4))
    assert strays(engine, everything) == []


def test_preempted_requests_keep_their_answers(engine: OrderedBench) -> None:
    assert_preempted_requests_answer_alike(engine)
