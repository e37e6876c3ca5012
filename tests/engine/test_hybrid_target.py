"""A target with layers that keep a state (Qwen3-Next: linear attention) and others that attend: what drafts for it.

Apart from other engines: vLLM makes the process group of a mixture of experts only where no engine runs yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine import planted_models
from tests.engine.engines import POOR_DRAFT, block, draft_model, lookup, mtp
from tests.engine.ordered import OrderedBench, ordered
from tests.engine.test_block_drafts import (
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return planted_models.qwen3_next(folder / "hybrid", recurrent=RECURRENT)


@pytest.fixture(scope="module")
def engine(folder: Path, target: Path) -> Iterator[OrderedBench]:
    pool = [lookup(), mtp(), block(planted_models.dflash(folder / "dflash"), "dflash"), draft_model(POOR_DRAFT)]
    with ordered(pool, target=target, extra=IN_16_BITS) as started:
        yield started


def test_lookup_mtp_block_and_draft_model_are_lossless(engine: OrderedBench) -> None:
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


def test_preempted_requests_answer_alike(engine: OrderedBench) -> None:
    assert_preempted_requests_answer_alike(engine)
