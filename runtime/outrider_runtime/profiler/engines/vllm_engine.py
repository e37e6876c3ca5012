"""vLLM with Outrider's plugin, as the profiler measures it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_crds.runtime_config import BootConfig, HotConfig

from outrider_runtime.drafters.pool import HostedPool
from outrider_runtime.identity import device_name, engine_version
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.paths import Paths
from outrider_runtime.profiler.engines.measurable import Measurable, RunningRequest
from outrider_runtime.profiler.grid import EngineLimits
from outrider_runtime.vllm_plugin.arguments import engine_arguments, prepare_vllm
from outrider_runtime.vllm_plugin.launch import (
    LaunchPlan,
    after_failure,
    load_plan,
    noted_failures,
    plan_launch,
    prepare,
)


@dataclass(frozen=True, slots=True)
class VLLMLaunch:
    """Plan for vLLM's process."""

    plan: LaunchPlan

    @property
    def pool(self) -> HostedPool:
        return self.plan.pool

    def prepare(self, environ: MutableMapping[str, str]) -> None:
        prepare(self.plan, environ)  # variables such as LD_PRELOAD take effect, because the process is new
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the driver needs the scheduler in its own process

    def left_out(self) -> Mapping[str, str]:
        return noted_failures(self.plan)

    def name_culprits(self, error: Exception) -> Mapping[str, str]:
        smaller = after_failure(self.plan, error)
        return {**(smaller.pool.dropped if smaller is not None else {}), **self.left_out()}


class VLLMEngine:
    """vLLM's engine behind the profiler's interface."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._config = self._core.vllm_config
        self.loop: ControlLoop = self._scheduler.outrider
        self.limits = self._limits()
        self.vocabulary = int(self._config.model_config.get_vocab_size())
        self.on_cpu = bool(self._config.device_config.device_type == "cpu")
        self.device = device_name()
        self.version = engine_version()
        self.report_delay_steps = 2 if self._config.scheduler_config.async_scheduling else 0

    def _limits(self) -> EngineLimits:
        config, speculative = self._config, self._config.speculative_config
        return EngineLimits(
            max_requests=self._scheduler.max_num_running_reqs,
            max_model_len=config.model_config.max_model_len,
            max_draft_tokens=speculative.num_speculative_tokens if speculative else 0,
            step_tokens=self._scheduler.max_num_scheduled_tokens,
            kv_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        )

    @property
    def has_requests(self) -> bool:
        return bool(self._scheduler.has_requests())

    @property
    def running(self) -> Sequence[RunningRequest]:
        return [RunningRequest(request.num_tokens, _decodes(request)) for request in self._scheduler.running]

    def add(self, name: str, tokens: Sequence[int]) -> None:
        from vllm import SamplingParams

        endless = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1 << 20, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(tokens)}, endless)

    def drop(self, names: Sequence[str]) -> None:
        """Abort these requests. The worker frees them in its next step."""
        self._engine.abort_request(list(names))

    def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        """Set placeholders (-1), which the worker replaces with the drafter's tokens, or with others if it has none."""
        for request, length in zip(self._scheduler.running, lengths, strict=True):
            request.spec_token_ids = [-1] * length

    def step(self) -> None:
        self._engine.step()


def start_engine(plan: LaunchPlan) -> Any:
    """Start vLLM's engine with the server's arguments, but in this process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    from outrider_runtime.vllm_plugin.versions import make_arg_parser

    prepare_vllm(worker_is_here=True)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(engine_arguments(plan))
    parsed.model = parsed.model_tag
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    arguments.disable_log_stats = True
    # The usage context selects vLLM's default limits of a step. The server's are needed.
    return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)


def _start() -> VLLMEngine:
    return VLLMEngine(start_engine(load_plan()))


def _decodes(request: Any) -> bool:
    return bool(request.num_computed_tokens >= request.num_prompt_tokens and request.num_output_tokens > 0)


def _plan(boot: BootConfig, hot: HotConfig, paths: Paths) -> VLLMLaunch:
    return VLLMLaunch(plan_launch(boot, hot, paths))


MEASURABLE = Measurable(plan=_plan, start=_start)
