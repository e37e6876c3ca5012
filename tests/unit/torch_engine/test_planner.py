"""What the loop hears of an engine before it decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.control.data.batch import Batch
from outrider_runtime.control.data.plans import DraftPlan
from outrider_runtime.torch_engine.batch_scheduler import TARGET
from outrider_runtime.torch_engine.kv_pool import Holder

from tests.unit.torch_engine.engines import Bench, bench


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Bench, list[Batch]]:
    """An engine with room for 210 tokens, and what the loop is told at the end of each step."""
    here, batches = bench(folder, kv_tokens=210), list[Batch]()
    decide = here.loop.plan_draft

    def noted(batch: Batch) -> DraftPlan:
        batches.append(batch)
        return decide(batch)

    monkeypatch.setattr(here.loop, "plan_draft", noted)
    return here, batches


def test_the_loop_hears_when_memory_is_short(told: tuple[Bench, list[Batch]]) -> None:
    """Bug: each request was said to hold memory for 2^40 tokens more. What fits is what nobody holds, and the rest of
    the requests' own buffers."""
    here, batches = told
    here.add([3] * 60, 30)
    here.step()
    here.step()
    assert [batch.free_kv_tokens for batch in batches] == [210, 210 - 32]
    here.add([4] * 30, 30)
    here.step()
    pool, (first, second) = here.engine._pool, here.engine.scheduler.running
    held = pool.tokens(Holder(TARGET, first.name)) + pool.tokens(Holder(TARGET, second.name))
    assert held > 90
    assert batches[-1].free_kv_tokens == 210 - 60
