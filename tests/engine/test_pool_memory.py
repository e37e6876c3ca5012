"""A pool that does not fit into memory: the pod comes up without its largest drafters, and says what each takes.

Real vLLM in this process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.vllm_plugin import launch

from tests.engine import engines
from tests.engine.engines import Bench, boot_config, draft_model, lookup
from tests.engine.planted_models import counting_llama
from tests.engine.test_drafter_start_failures import reasons
from tests.engine.test_lossless_speculation import SHORT

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


LONGEST = 100_000
"""1 GiB holds the KV of a request of so many tokens in the target's layers and in one draft's, not in two."""


def test_pool_that_does_not_fit_starts_without_the_largest(tmp_path: Path) -> None:
    """Bug: vLLM ended for want of KV, and the pod with it."""
    target = counting_llama(tmp_path / "target", max_position_embeddings=LONGEST)
    run_dir = engines.make_plan([]).paths
    pool = [draft_model(target), draft_model(target, "twin"), lookup()]
    boot = boot_config(pool, extra=[f"--max-model-len={LONGEST}"], target=target)
    plan = launch.plan_launch(boot, engines.hot_config(), run_dir)
    with engines.own_environment(VLLM_CPU_KVCACHE_SPACE="1"):
        with pytest.raises(ValueError, match="KV cache") as refused, engines.engine(plan):
            pass
        smaller = launch.after_failure(plan, refused.value)
        assert smaller is not None
        assert len(smaller.pool.neural) == 1
        with engines.engine(smaller) as llm:
            engine = Bench(llm, smaller)
            ((name, reason),) = reasons(engine).items()
            assert name in ("draft", "twin")
            assert "draft takes" in reason
            assert "twin takes" in reason
            engine.loop.pin(2, "pld")
            assert engine.generate(SHORT[:2])
