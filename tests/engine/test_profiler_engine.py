"""The profiling Job measures the engine that serves: both are given the same arguments. vLLM reads them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from outrider_runtime.drafters.pool import HostedPool
from outrider_runtime.vllm_plugin import arguments

from tests.engine.engines import boot_config, eagle, lookup, own_environment
from tests.unit.vllm_plugin.test_what_the_engine_is_started_with import HEAD, on_gpu, plan_of

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
OF_ITS_PROCESSES = {"distributed_executor_backend", "disable_log_stats", "logging_config", "shutdown_timeout"}


@pytest.mark.parametrize("product", ["cpu", "NVIDIA-H200"])
def test_the_profiler_starts_the_engine_that_serves(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: it measured on the first runner, synchronously, with other limits of a step and in other graphs. What is
    left to differ is where the engine's parts run."""
    from outrider_runtime.profiler.engines.vllm_engine import start_engine
    from outrider_runtime.server.engine_server import Drain
    from outrider_runtime.server.vllm_backend import parse_arguments
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    pool = (lookup(), eagle(HEAD))
    plan = plan_of(boot_config(pool) if product == "cpu" else on_gpu(boot_config(pool)), HostedPool(hosted=pool))
    keywords: dict[str, Any] = {}
    started = staticmethod(lambda arguments, **how: keywords.update(how, arguments=arguments))
    monkeypatch.setattr(LLMEngine, "from_engine_args", started)
    with own_environment():
        start_engine(plan)
        serves = AsyncEngineArgs.from_cli_args(parse_arguments(arguments.server_arguments(plan), Drain(0.0, None)))
    measures = keywords["arguments"]
    differ = {field.name for field in fields(serves) if getattr(serves, field.name) != getattr(measures, field.name)}
    assert differ <= OF_ITS_PROCESSES
    assert serves.async_scheduling is None, "vLLM decides: on GPUs it is asynchronous"
    assert keywords["usage_context"] == UsageContext.OPENAI_API_SERVER
