"""vLLM's engine core in this process, with a `Playback` as its executor and a workload's requests."""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.runtime_config import HotConfig
from outrider_crds.spec import DraftPrefillMode, SpeculationMode
from outrider_runtime.loop import request_table as loop_requests
from outrider_runtime.simulate.recording import DEPTH
from outrider_runtime.simulate.replay.device import Device
from outrider_runtime.simulate.replay.engine import Log, Setting
from outrider_runtime.simulate.replay.replay_requests import BLOCK_TOKENS, ReplayRequests
from outrider_runtime.simulate.replay.workload import Floats, Workload
from outrider_runtime.vllm_plugin import arguments, launch
from outrider_runtime.worker_notes import write_device_ranks

from bench.host_costs import HostCosts
from bench.replay.adaptive import AdaptiveVerification, cost_tables
from bench.replay.settings import LONGEST
from bench.virtual_clock.clock import Clock
from tests.engine import engines

LONGEST_REQUEST = 2048
TOKEN = 7
"""Id of every prompt token. No model reads it."""
HOSTED = {
    "eagle": engines.eagle(),
    "draft": engines.draft_model(engines.POOR_DRAFT),
    "lookup": engines.lookup("lookup"),
    "sparse": engines.sparse_self(512, "sparse"),
}
"""Drafters by name in the recording. Only the configs of their models are read."""
METHODS: dict[str, dict[str, object]] = {
    "eagle": {"method": "eagle3", "model": str(engines.EAGLE_HEAD)},
    "draft": {"method": "draft_model", "model": str(engines.POOR_DRAFT)},
    "lookup": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}


@dataclass(frozen=True, slots=True)
class Stock:
    """vLLM as it is; without a drafter it does not speculate."""

    drafter: str | None = None
    k: int = 0
    adaptive: bool = False
    """Whether the device chooses how many drafted tokens to verify."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Figures of a workload that was served."""

    latency_s: float
    """Mean over all requests, from arrival to last token."""
    draft_length: float
    """Mean proposals verified per request and step."""
    preempted: int
    steady_latency_s: float = math.nan
    """Mean over the requests after each client's first one."""
    arrived_s: Floats = field(default_factory=lambda: np.zeros(0))
    done_s: Floats = field(default_factory=lambda: np.zeros(0))
    """(R,): when each request came, and when its last token did; empty for a replay."""


def mean_draft_length(log: Log) -> float:
    return sum(log.verified) / sum(log.requests)


def serve(
    setting: Setting, load: Workload, stock: Stock | None, profile: Any, *, asynchronous: bool,
    host: HostCosts | None = None, watch: Callable[[Any], None] = lambda _core: None,
) -> Served:  # fmt: skip
    """Serve `load`, in vLLM with the loop, which mounts `profile`, or in stock vLLM.

    host: see `charge`; None: the host takes no time. watch: gets the engine core before it serves.
    """
    clock, requests = Clock(), ReplayRequests(replace(load, output=load.output + DEPTH))  # drafters know no end
    device = Device(setting.world, setting.recording, setting.drafters, requests)
    names = [drafter.name for drafter in setting.drafters]
    stock_drafter = names.index(stock.drafter) if stock and stock.drafter else None
    plan = _plan([HOSTED[name] for name in names], setting)
    ranks = setting.device_ranks and stock is None

    def executor(config: Any) -> Any:
        from outrider_runtime.vllm_plugin import cpu_worker  # it binds vLLM's kernels before Playback's modules do

        from bench.virtual_clock.executor import Playback  # vLLM's environment must be there

        assert cpu_worker
        write_device_ranks(plan.paths.run_dir, device_ranks=ranks)  # as the worker does; the scheduler reads it later
        on_device = None
        if stock and stock.adaptive and stock.drafter:
            costs = cost_tables(setting.world, stock.drafter, stock.k, setting.limits.max_requests)
            on_device = AdaptiveVerification(len(load), stock.k, costs)
        return Playback(device, clock, stock_drafter, config, on_device, device_ranks=ranks)

    with _core(plan, stock, setting, executor, clock, asynchronous) as core:
        if stock is None:
            core.scheduler.outrider_reporter.stop()  # whose profile would be the mounted one
            core.scheduler.outrider.replace_latency(profile)
        if host is not None:
            charge(core, clock, host)
        watch(core)
        _run_load(core, load, requests, clock)
        latency_s = requests.done_s - requests.arrived_s
        playback = core.model_executor
        steady_s = float(latency_s[load.clients or 0 :].mean())
        length = mean_draft_length(playback.log)
        return Served(
            float(latency_s.mean()), length, playback.preempted, steady_s, requests.arrived_s, requests.done_s
        )


def charge(core: Any, clock: Clock, host: HostCosts) -> None:
    """Let the scheduler's two calls of each step take the host's time.

    The clock moves on by `host.schedule` after vLLM has scheduled a step, and by `host.update` before vLLM processes a
    step's output. In synchronous mode the device waits for both. In asynchronous mode the device meanwhile runs the
    step before; a step begins when it is scheduled and the device is free (`Playback`). So vLLM waits only for the part
    of the host's time that outlasts the device's:

        step_s = max(device_s, schedule_s + update_s)
    """
    scheduler = core.scheduler
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def schedule_and_charge(*arguments: Any, **keywords: Any) -> Any:
        output = schedule(*arguments, **keywords)
        clock.now_s += host.schedule(len(output.num_scheduled_tokens))
        return output

    def update_and_charge(output: Any, *arguments: Any, **keywords: Any) -> Any:
        clock.now_s += host.update(len(output.num_scheduled_tokens))
        return update(output, *arguments, **keywords)

    scheduler.schedule, scheduler.update_from_output = schedule_and_charge, update_and_charge


def _run_load(core: Any, load: Workload, requests: ReplayRequests, clock: Clock) -> None:
    """Add the load's requests between the engine core's steps until all have ended."""
    following, running = 0, 0
    while following < len(load) or running or core.batch_queue:
        while following < len(load) and load.at_s[following] <= clock.now_s and running < (load.clients or len(load)):
            if load.clients is not None:
                requests.arrived_s[following] = clock.now_s
            core.add_request(_request(load, following, float(requests.arrived_s[following])))
            following, running = following + 1, running + 1
        if not core.scheduler.has_requests() and not core.batch_queue:
            clock.now_s = max(clock.now_s, float(load.at_s[following]))
            continue
        outputs, executed = core.step_fn()
        core.post_step(executed)
        running -= _note(outputs or {}, requests, clock.now_s)


def _note(outputs: dict[int, Any], requests: ReplayRequests, now_s: float) -> int:
    """Record first and last token times, and return the number of requests that ended."""
    ended = 0
    for output in (output for client in outputs.values() for output in client.outputs):
        row = int(output.request_id)
        if output.new_token_ids and np.isnan(requests.first_s[row]):
            requests.first_s[row] = now_s
        if output.finish_reason is not None:
            requests.done_s[row] = now_s
            ended += 1
    return ended


def _request(load: Workload, row: int, arrived_s: float) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(temperature=0.0, max_tokens=int(load.output[row]), ignore_eos=True)
    return Request(str(row), [TOKEN] * int(load.prompt[row]), sampling, None, arrival_time=arrived_s)


def _plan(drafters: list[DrafterSpec], setting: Setting) -> launch.LaunchPlan:
    hot = HotConfig(
        mode=SpeculationMode.CLOSED_LOOP, draft_prefill=DraftPrefillMode.AUTO, max_draft_tokens=LONGEST, slo_classes=[]
    )
    limits = setting.limits
    tokens = min(limits.kv_tokens, 2 * limits.max_requests * LONGEST_REQUEST)  # vLLM makes an object of each block
    extra = (
        f"--max-model-len={LONGEST_REQUEST}", f"--max-num-seqs={limits.max_requests}", f"--block-size={BLOCK_TOKENS}",
        f"--max-num-batched-tokens={limits.token_budget}", "--no-enable-prefix-caching",
        f"--num-gpu-blocks-override={1 + tokens // BLOCK_TOKENS}",  # one is vLLM's own
    )  # fmt: skip
    plan = engines.make_plan(drafters, hot)
    engine = plan.boot.engine.model_copy(update={"extra_args": list(extra)})
    boot = plan.boot.model_copy(update={"max_draft_tokens": LONGEST, "engine": engine})
    return plan.model_copy(update={"boot": boot})


def _arguments(plan: launch.LaunchPlan, stock: Stock | None) -> list[str]:
    ours = arguments.engine_arguments(plan)
    if stock is None:
        return ours
    mine = ("--scheduler-cls", "--worker-cls", "--speculative-config", "--additional-config")
    kept = [argument for argument in ours if not argument.startswith(mine)]
    if stock.drafter is None:
        return kept
    config = METHODS[stock.drafter] | {"num_speculative_tokens": stock.k}
    return [*kept, f"--speculative-config={json.dumps(config)}"]


@contextmanager
def _core(
    plan: launch.LaunchPlan,
    stock: Stock | None,
    setting: Setting,
    executor: Callable[[Any], Any],
    clock: Clock,
    asynchronous: bool,
) -> Iterator[Any]:
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, plan.paths.run_dir, ignore_errors=True)
        stack.callback(gc.collect)  # an engine core is in cycles
        stack.enter_context(engines.small_heap())
        stack.enter_context(engines.own_environment(VLLM_LOGGING_LEVEL="ERROR"))
        stack.enter_context(engines._asynchronous_scheduling() if asynchronous else nullcontext())
        launch.prepare(plan)
        engines.hide_dunders_of_llvmlite()
        arguments.prepare_vllm(worker_is_here=True)
        config = _config(_arguments(plan, stock))
        config.compilation_config.max_cudagraph_capture_size = setting.world.graph_tokens

        from outrider_runtime.vllm_plugin import scheduler
        from vllm.v1.engine.core import EngineCore

        for module in (scheduler, loop_requests):
            stack.enter_context(mock.patch.object(module, "time", clock))
        core = EngineCore(config, executor, log_stats=False)
        stack.callback(core.shutdown)
        yield core


def _config(engine_arguments: list[str]) -> Any:
    from outrider_runtime.vllm_plugin.versions import make_arg_parser
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", *engine_arguments])
    return EngineArgs.from_cli_args(parsed).create_engine_config()
