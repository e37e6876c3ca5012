"""A pool that does not fit into memory: the pod comes up without its largest drafters, and says what each takes.

Real vLLM in this process.
"""

from __future__ import annotations

import pytest
from outrider_runtime.vllm_plugin import launch

from tests.engine import engines
from tests.engine.engines import TARGET, Bench, boot_config, draft_model, lookup
from tests.engine.test_drafters_that_cannot_start import reasons
from tests.engine.test_speculation_is_lossless import SHORT

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def test_pool_that_does_not_fit_starts_without_the_largest() -> None:
    """Bug: vLLM ended for want of KV, and the pod with it. 1 GiB holds a request of 8,192 tokens in the target's layers
    and in one draft's, not in two."""
    run_dir = engines.make_plan([]).paths
    boot = boot_config(
        [draft_model(TARGET), draft_model(TARGET, "twin"), lookup()], extra=["--max-model-len=8192"]
    )  # fmt: skip
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
