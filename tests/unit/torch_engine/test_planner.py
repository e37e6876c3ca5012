"""What the control loop knows of the engine when it decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.control.batch import Batch
from outrider_runtime.control.plans import DraftPlan
from outrider_runtime.torch_engine.batch_scheduler import TARGET
from outrider_runtime.torch_engine.kv_pool import Holder

from tests.unit.torch_engine.engines import Harness, make_harness


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Harness, list[Batch]]:
    """An engine with room for 210 tokens, and the batch that the control loop sees at the end of each step."""
    harness, batches = make_harness(folder, kv_tokens=210), list[Batch]()
    decide = harness.loop.plan_draft

    def watch(batch: Batch) -> DraftPlan:
        batches.append(batch)
        return decide(batch)

    monkeypatch.setattr(harness.loop, "plan_draft", watch)
    return harness, batches


def test_loop_sees_free_kv_tokens_shrink(watched: tuple[Harness, list[Batch]]) -> None:
    """Bug: each request seemed to have room for 2^40 more tokens. The room is free memory, and the unused part of the
    requests' own buffers."""
    harness, batches = watched
    harness.add([3] * 60, 30)
    harness.step()
    harness.step()
    assert [batch.free_kv_tokens for batch in batches] == [210, 210 - 32]
    harness.add([4] * 30, 30)
    harness.step()
    pool, (first, second) = harness.engine._pool, harness.engine.scheduler.running
    buffer_tokens = pool.tokens(Holder(TARGET, first.name)) + pool.tokens(Holder(TARGET, second.name))
    assert buffer_tokens > 90
    assert batches[-1].free_kv_tokens == 210 - 60
