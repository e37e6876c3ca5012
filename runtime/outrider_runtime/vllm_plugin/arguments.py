"""The arguments of vLLM's engine: those that the plugin needs, then the user's."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence

from outrider_crds.draft_pool import DrafterSpec, DraftMethod
from outrider_crds.model_sources import MOST_ADAPTERS, Lora, ModelRef
from outrider_crds.runtime_config import SERVING_PORT, BootConfig, draft_mount
from outrider_crds.spec import Dtype

from outrider_runtime.bucket import LOAD_FORMAT
from outrider_runtime.drafters.block import BlockCheckpoint
from outrider_runtime.drafters.draft_configs import ModelConfig, typed_config
from outrider_runtime.drafters.pool import model_config
from outrider_runtime.drafters.suffix import match_lengths
from outrider_runtime.dtype import engine_dtype
from outrider_runtime.vllm_plugin import patches
from outrider_runtime.vllm_plugin.graphs import graph_sizes
from outrider_runtime.vllm_plugin.launch import LaunchPlan, target_location

SCHEDULER_CLASS = "outrider_runtime.vllm_plugin.scheduler.outrider_scheduler"
CPU_WORKER_CLASS = "outrider_runtime.vllm_plugin.cpu_worker.OutriderCPUWorker"
CPU_EXECUTOR_CLASS = "outrider_runtime.vllm_plugin.cpu_executor.OutriderCPUExecutor"
GPU_WORKER_CLASS = "outrider_runtime.vllm_plugin.gpu_worker.OutriderGPUWorker"
LOOKAHEAD_TOKENS = "outrider_lookahead_tokens"
"""Key of vLLM's `additional_config`, which every process of an engine has: see `draft_room`."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for the highest rank."""
MOST_ADAPTERS_IN_MEMORY = 2 * MOST_ADAPTERS
"""Adapters of a service, and the earlier weights of each that running requests still use."""
DEFAULT_MAX_NUM_SEQS = {256, 1024}
"""Defaults of vLLM's server on smaller and on larger GPUs."""


def engine_arguments(plan: LaunchPlan) -> list[str]:
    """Return the arguments of vLLM's own server: the model first, the user's extra arguments last."""
    boot = plan.boot
    arguments = [
        target_location(plan),
        *_served_names(boot),
        f"--port={SERVING_PORT}",
        f"--dtype={_dtype(plan).value}",
        f"--tensor-parallel-size={boot.engine.tensor_parallel_size}",
    ]
    if boot.target.revision and boot.target.source.hub is not None:
        arguments.append(f"--revision={boot.target.revision}")
    if any(model.source.s3 is not None for model in _models(plan)):
        arguments.append(f"--load-format={LOAD_FORMAT}")
    if boot.engine.max_model_len is not None:
        arguments.append(f"--max-model-len={boot.engine.max_model_len}")
    settings = engine_settings(plan)
    words = [word for name, value in settings.items() for word in _argument(name, value)]
    return [*arguments, *_lora_arguments(boot.engine.lora), *words, *boot.engine.extra_args]


def engine_settings(plan: LaunchPlan) -> dict[str, object]:
    """Return the fields of vLLM's EngineArgs through which Outrider drives the engine. The rest are the user's."""
    settings: dict[str, object] = {
        "scheduler_cls": SCHEDULER_CLASS,
        "worker_cls": CPU_WORKER_CLASS if plan.boot.accelerator.on_cpu else GPU_WORKER_CLASS,
    }
    speculative = speculative_config(plan)
    if speculative is not None:
        settings["speculative_config"] = speculative
    additional = {**_heads_for_the_compiler(plan), **_lookahead(plan)}
    if additional:
        settings["additional_config"] = additional
    return settings | _graph_settings(plan)


def _argument(name: str, value: object) -> list[str]:
    """Return the words of the argument that sets a field of EngineArgs."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def _models(plan: LaunchPlan) -> list[ModelRef]:
    """Models that the engine loads, with one loader for all."""
    return [plan.boot.target, *(drafter.neural.model for drafter in plan.pool.neural if drafter.neural is not None)]


def _served_names(boot: BootConfig) -> list[str]:
    """Return the served names, the target's first: responses carry the first name."""
    names = dict.fromkeys((boot.target.name, *boot.engine.served_model_names))
    return [f"--served-model-name={boot.target.name}"] if len(names) == 1 else ["--served-model-name", *names]


def _dtype(plan: LaunchPlan) -> Dtype:
    """Return the dtype: that of every engine, except that vLLM chooses it for quantised weights."""
    configured, dtype = plan.boot.engine.dtype, engine_dtype(plan.boot)
    return configured if dtype is not configured and _is_quantised(plan) else dtype


def _is_quantised(plan: LaunchPlan) -> bool:
    if any(argument.startswith(("--quantization", "-q")) for argument in plan.boot.engine.extra_args):
        return True
    try:
        return "quantization_config" in model_config(plan.boot.target, target_location(plan))
    except (OSError, ValueError):  # vLLM will say what is wrong with it
        return False


def server_arguments(plan: LaunchPlan, group: Sequence[str] = ()) -> list[str]:
    """Return `engine_arguments` for a server, in which vLLM may run the worker as a process of its own.

    group: arguments of a process that shares the target with those of other nodes.
    """
    model, *arguments = engine_arguments(plan)
    if group:
        return [model, *group, *arguments]
    executor = [f"--distributed-executor-backend={CPU_EXECUTOR_CLASS}"] if plan.boot.accelerator.on_cpu else []
    return [model, *executor, *arguments]


def speculative_config(plan: LaunchPlan) -> dict[str, object] | None:
    """Return vLLM's speculative config: that of the pool's primary drafter; None without a pool."""
    if plan.pool.primary is None:
        return None
    return member_config(plan.pool.primary, plan)


def member_config(drafter: DrafterSpec, plan: LaunchPlan) -> dict[str, object]:
    """Return the arguments of vLLM's SpeculativeConfig for one drafter of the pool."""
    boot = plan.boot
    # A table of lengths tells vLLM that the length varies. Its content does not matter: the scheduler sets the length
    # at every step, and graphs are captured for all lengths (`capture_every_length`).
    most: dict[str, object] = {
        "num_speculative_tokens": boot.max_draft_tokens,
        "num_speculative_tokens_per_batch_size": [[1, 1, boot.max_draft_tokens]],
    }
    match = match_lengths(drafter)
    if match is not None:
        # vLLM schedules asynchronously only for the method that searches on the device.
        method = "ngram" if boot.accelerator.on_cpu else "ngram_gpu"
        return {
            **most, "method": method,
            "prompt_lookup_min": match.shortest, "prompt_lookup_max": match.longest,
        }  # fmt: skip
    if drafter.mtp is not None:
        return {**most, "method": "mtp"}
    model, location = boot.target, target_location(plan)  # for self-speculation
    if drafter.neural is not None:
        model = drafter.neural.model
        location = plan.paths.models.location(model, draft_mount(drafter.name))
    config: dict[str, object] = {
        **most,
        "method": _method(drafter, plan),
        "model": location,
        "draft_tensor_parallel_size": boot.engine.tensor_parallel_size,
    }
    if model.revision and model.source.hub is not None:
        config["revision"] = model.revision
    return config


def _method(drafter: DrafterSpec, plan: LaunchPlan) -> str:
    """Return vLLM's name of the method of a drafter that has a model."""
    if drafter.block is not None:
        return "dspark" if _draft_config(drafter, plan).block_kind == "DSpark" else "dflash"
    return "eagle3" if drafter.method is DraftMethod.EAGLE else "draft_model"


def _draft_config(drafter: DrafterSpec, plan: LaunchPlan) -> ModelConfig:
    assert drafter.neural is not None
    location = plan.paths.models.location(drafter.neural.model, draft_mount(drafter.name))
    return typed_config(model_config(drafter.neural.model, location), location)


def block_checkpoint(drafter: DrafterSpec, plan: LaunchPlan) -> BlockCheckpoint:
    assert drafter.block is not None
    config = _draft_config(drafter, plan)
    limits = drafter.block.max_tokens, config.block_tokens, plan.boot.max_draft_tokens
    return BlockCheckpoint(config.block_kind, min(limit for limit in limits if limit is not None))


def _lora_arguments(lora: Lora | None) -> list[str]:
    """Return the room for adapters. All that are loaded stay in host memory: a step never reads a file."""
    if lora is None:
        return []
    rank = next(rank for rank in LORA_RANKS if rank >= lora.max_rank)
    return [
        "--enable-lora",
        f"--max-loras={lora.max_adapters}",
        f"--max-lora-rank={rank}",
        f"--max-cpu-loras={MOST_ADAPTERS_IN_MEMORY}",
    ]


def _heads_for_the_compiler(plan: LaunchPlan) -> dict[str, object]:
    """Name all heads in vLLM's config, whose hash is the key of compiled code.

    vLLM's own config names only the layers that a primary EAGLE head reads. But the target outputs hidden states for
    all heads, and for block drafters.
    """
    models = [drafter.eagle or drafter.block for drafter in plan.pool.hosted]
    heads = [head.model.wire() for head in models if head is not None]
    has_block = any(drafter.block is not None for drafter in plan.pool.hosted)
    return {"outrider_heads": heads} if has_block or len(heads) > 1 else {}


def _lookahead(plan: LaunchPlan) -> dict[str, object]:
    """Tell vLLM how many tokens behind the last one the widest member writes: a block and its anchor."""
    blocks = [drafter for drafter in plan.pool.hosted if drafter.block is not None]
    return {LOOKAHEAD_TOKENS: plan.boot.max_draft_tokens + 1} if blocks else {}


def _graph_settings(plan: LaunchPlan) -> dict[str, object]:
    if plan.boot.accelerator.on_cpu:
        # vLLM's compiler needs a C++ compiler on a CPU; an image without one would fail during warm-up.
        return {} if shutil.which("g++") else {"enforce_eager": True}
    if plan.pool.primary is None or _names_graphs(plan.boot.engine.extra_args):
        return {}
    chosen = plan.boot.engine.max_num_seqs
    requests = DEFAULT_MAX_NUM_SEQS if chosen is None else {chosen}
    sizes = {size for most in requests for size in graph_sizes(plan.boot.max_draft_tokens, most)}
    return {"cudagraph_capture_sizes": sorted(sizes)}


def _names_graphs(extra_arguments: list[str]) -> bool:
    """Return whether the user chooses the graphs: vLLM refuses sizes in two arguments."""
    flags = ("--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--compilation-config")
    return any(argument.replace("_", "-").startswith(flags) for argument in extra_arguments)


def prepare_vllm(*, worker_is_here: bool = False) -> None:
    """Prepare the process that makes vLLM's config; call it before that.

    It imports vLLM, so the environment must be set (`launch.prepare`). worker_is_here: whether the whole engine, worker
    included, runs in this process.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import outrider_cpu

        outrider_cpu.install() if worker_is_here else outrider_cpu.allow_second_runner()

    check = patches.original(patches.SPECULATION_CHECK)
    patches.put(patches.SPECULATION_CHECK, functools.wraps(check)(lambda *_arguments: None))
