"""Two ranks share a target with block drafters and MTP in its pool: each runs the same passes, so that none waits in a
sum that the other never enters, and the answers are those of plain decoding.

Real vLLM, each rank a process of its own; they meet over gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from outrider_runtime.vllm_plugin.arguments import CPU_EXECUTOR_CLASS

from tests.engine import planted_models
from tests.engine.engines import block, lookup, mtp
from tests.engine.ordered import ordered
from tests.engine.planted_models import COUNTING_SIZES
from tests.engine.test_block_drafts import IN_CHUNKS, PROMPTS, by_turns, everything, fed_then_short, idle

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def test_two_ranks_with_block_and_mtp_agree(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = planted_models.qwen3_next(tmp_path / "target", recurrent=(), **COUNTING_SIZES)
    successors = {token: token + 1 for token in range(300)}
    pool = [
        lookup(),
        mtp(),
        block(planted_models.dflash(tmp_path / "dflash", **COUNTING_SIZES), "dflash"),
        block(planted_models.dspark(tmp_path / "spark", successors, **COUNTING_SIZES), "spark"),
    ]
    extra = (f"--distributed-executor-backend={CPU_EXECUTOR_CLASS}", *IN_CHUNKS)
    with ordered(pool, target=target, ranks=2, extra=extra) as engine:
        assert not engine.failures
        reference = engine.run(PROMPTS, idle)
        for give in (everything, by_turns, fed_then_short(2)):
            assert engine.run(PROMPTS, give, arrive_every=2) == reference
            assert all(not report.failures for _, report in engine.orders_and_reports)
        engine.run(PROMPTS, everything)
        assert all(engine.proposed(member) for member in range(len(pool)))
