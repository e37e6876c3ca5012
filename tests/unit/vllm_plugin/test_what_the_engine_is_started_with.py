"""The engine's arguments and environment: what the plugin needs is there, what the user set wins."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.model_sources import Lora
from outrider_crds.pod_template import EnvVar
from outrider_crds.runtime_config import BootConfig
from outrider_crds.spec import Accelerator, Engine
from outrider_runtime import dtype
from outrider_runtime.drafters.pool import HostedPool
from outrider_runtime.memory_limit import cpu_cache_gib
from outrider_runtime.paths import Paths
from outrider_runtime.vllm_plugin import arguments, launch
from outrider_runtime.vllm_plugin.environment import engine_environment
from outrider_runtime.vllm_plugin.versions import UntestedEngineError, check_engine_version

from tests.engine.engines import boot_config, draft_model, eagle, hot_config, lookup

HEAD = Path("/heads/eagle")


def plan_of(boot: BootConfig, pool: HostedPool) -> launch.LaunchPlan:
    paths = Paths(run_dir="/run/outrider")
    return launch.LaunchPlan(boot=boot, hot=hot_config(), paths=paths, pool=pool, engine_version="0.32.0")


def on_gpu(boot: BootConfig, **engine: object) -> BootConfig:
    update = {"accelerator": Accelerator(products=["NVIDIA-H200"], count=1), "engine": Engine(**engine)}
    return boot.model_copy(update=update)


def test_without_a_draft_pool_there_is_no_speculative_config() -> None:
    """Promise: NoDrafter means plain vLLM underneath, not speculation with nothing to speculate."""
    plan = plan_of(boot_config([]), HostedPool())
    assert arguments.speculative_config(plan) is None
    assert not any(argument.startswith("--speculative-config") for argument in arguments.engine_arguments(plan))


def test_further_names_of_the_model_follow_its_own() -> None:
    """vLLM puts the first one into answers."""
    boot = boot_config([])
    boot = boot.model_copy(update={"engine": Engine(served_model_names=["gpt-4o-mini", boot.target.name, "llama"])})
    command = arguments.engine_arguments(plan_of(boot, HostedPool()))
    place = command.index("--served-model-name")
    assert command[place + 1 : place + 4] == [boot.target.name, "gpt-4o-mini", "llama"]
    assert command[place + 4].startswith("--")


def test_pickle_with_code_is_refused_with_a_remedy() -> None:
    """Bug: the status showed torch's advice to run the code that the file holds."""
    said = launch.start_failure(pickle.UnpicklingError("Weights only load failed. Re-running with weights_only=False"))
    assert said.endswith("save them as safetensors")
    assert "weights_only" not in said


@pytest.mark.parametrize(("rank", "of_vllm"), [(1, 1), (2, 8), (16, 16), (20, 32), (512, 512)])
def test_room_for_adapters_has_a_rank_that_vllm_takes(rank: int, of_vllm: int) -> None:
    """vLLM knows some ranks only. Every adapter stays in host memory, so no step reads a file."""
    boot = on_gpu(boot_config([]), lora=Lora(max_adapters=3, max_rank=rank))
    command = arguments.engine_arguments(plan_of(boot, HostedPool()))
    room = {"--enable-lora", "--max-loras=3", f"--max-lora-rank={of_vllm}", "--max-cpu-loras=64"}
    assert room <= set(command)
    assert not any("lora" in word for word in arguments.engine_arguments(plan_of(boot_config([]), HostedPool())))


@pytest.mark.parametrize(
    ("config", "extra", "served"),
    [({}, [], "float32"), ({"quantization_config": {}}, [], "auto"), ({}, ["--quantization=awq"], "auto")],
)
def test_quantised_weights_keep_their_dtype_on_a_slow_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], extra: list[str], served: str
) -> None:
    """vLLM computes with them in 16 bits, and does not start in float32."""
    monkeypatch.setattr(dtype, "multiplies_bfloat16", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    boot = boot_config([], target=tmp_path).model_copy(update={"engine": Engine(extra_args=extra)})
    plan = plan_of(boot, HostedPool()).model_copy(update={"paths": Paths(mounted=False)})
    assert f"--dtype={served}" in arguments.engine_arguments(plan)


def test_every_member_of_the_pool_proposes_lengths_that_vary() -> None:
    """Bug: only the primary drafter's config said so: a second head had graphs for the most tokens alone, and ran all
    its passes for any length."""
    pool = HostedPool(hosted=(lookup(), eagle(HEAD, "one"), eagle(HEAD, "two"), draft_model(HEAD)))
    plan = plan_of(boot_config(pool.hosted, 5), pool)
    for config in (
        arguments.speculative_config(plan),
        *(arguments.member_config(drafter, plan) for drafter in pool.hosted),
    ):
        assert config is not None
        assert config["num_speculative_tokens_per_batch_size"]
        assert config["num_speculative_tokens"] == 5


def test_vllm_hosts_the_neural_drafter_of_a_pool_that_has_one() -> None:
    """Promise: prompt lookup together with a neural drafter needs no second engine."""
    plan = plan_of(boot_config([lookup(), eagle(HEAD)]), HostedPool(hosted=(lookup(), eagle(HEAD))))
    config = arguments.speculative_config(plan)
    assert config is not None
    assert config["method"] == "eagle3"


def test_compile_cache_key_has_the_layers_of_all_heads() -> None:
    """vLLM's hash knows the primary head's layers. Code that was compiled for another pool would hand out others."""

    def config(*pool: DrafterSpec) -> list[str]:
        engine_arguments = arguments.engine_arguments(plan_of(boot_config(pool), HostedPool(hosted=pool)))
        return [argument for argument in engine_arguments if argument.startswith("--additional-config")]

    head, other = eagle(HEAD, "one"), eagle(Path("/other"), "other")
    assert config(lookup(), head) == []
    assert len(config(head, other)) == 1
    assert config(head, other) != config(head, eagle(Path("/third"), "other"))


def test_extra_arguments_come_last_so_that_the_user_decides() -> None:
    """argparse takes the last value of a flag."""
    plan = plan_of(boot_config([], extra=["--max-num-seqs=3"]), HostedPool())
    engine_arguments = arguments.engine_arguments(plan)
    assert engine_arguments[-1] == "--max-num-seqs=3"
    assert engine_arguments[0] == launch.target_location(plan)


def test_step_is_one_call_to_a_worker_in_its_own_process() -> None:
    """vLLM's own executor asks it for proposals in a call of their own. The user's choice of an executor comes last."""
    boot = boot_config([lookup()], extra=["--distributed-executor-backend=mp"])
    server_arguments = arguments.server_arguments(plan_of(boot, HostedPool(hosted=(lookup(),))))
    chosen = [argument for argument in server_arguments if argument.startswith("--distributed-executor-backend")]
    assert chosen == [
        f"--distributed-executor-backend={arguments.CPU_EXECUTOR_CLASS}",
        "--distributed-executor-backend=mp",
    ]
    gpu = plan_of(on_gpu(boot_config([lookup()])), HostedPool(hosted=(lookup(),)))
    assert arguments.server_arguments(gpu) == arguments.engine_arguments(gpu)


@pytest.mark.parametrize("extra", [["--max-num-seqs=8"], ["--max-num-seqs", "8"], ["--max_num_seqs=8"]])
def test_graphs_respect_the_users_batch_limit(extra: list[str]) -> None:
    """A graph for more requests than may run is memory for nothing."""
    boot = on_gpu(boot_config([lookup()]), extra_args=extra)
    engine_arguments = arguments.engine_arguments(plan_of(boot, HostedPool(hosted=(lookup(),))))
    start = engine_arguments.index("--cudagraph-capture-sizes") + 1
    sizes = [int(argument) for argument in engine_arguments[start:] if argument.isdigit()]
    assert max(number for number in sizes if number != 8) == 32


def sizes_given(*extra: str) -> list[int]:
    """Return the sizes of the graphs. extra: the user's arguments."""
    boot = on_gpu(boot_config([lookup()]), extra_args=list(extra))
    engine_arguments = arguments.engine_arguments(plan_of(boot, HostedPool(hosted=(lookup(),))))
    assert engine_arguments[len(engine_arguments) - len(extra) :] == list(extra)
    engine_arguments = engine_arguments[: len(engine_arguments) - len(extra)]
    return [int(size) for size in engine_arguments[engine_arguments.index("--cudagraph-capture-sizes") + 1 :]]


@pytest.mark.parametrize(
    "extra", [["--max-num-seqs=many"], ["--max-num-seqs"], ["--max-num-seqs=-1"], ["--max-num-seqs=0"], []], ids=str
)
def test_a_batch_limit_that_is_none_is_vllms_to_refuse(extra: list[str]) -> None:
    """Bug: it was a traceback of ours. And where there is none, vLLM's default is 256 requests on some GPUs and 1024 on
    others: the largest batch has a graph on either."""
    assert {256, 512} <= set(sizes_given(*extra))


def test_an_optimisation_level_names_no_graphs() -> None:
    """Bug: with -O3 among the user's arguments ours were left out, and a pod captured 658 graphs instead of 320."""
    assert sizes_given("-O3") == sizes_given()


@pytest.mark.parametrize("pool", [(lookup(),), (eagle(HEAD),), (draft_model(HEAD),), (lookup(), eagle(HEAD))], ids=str)
@pytest.mark.parametrize("product", ["cpu", "NVIDIA-H200"])
def test_every_pool_runs_in_the_second_runner(product: str, pool: tuple[DrafterSpec, ...]) -> None:
    """Promise: what is tested on a CPU is what serves on a GPU, asynchronous there whatever the pool holds."""
    boot = boot_config(pool) if product == "cpu" else on_gpu(boot_config(pool))
    plan = plan_of(boot, HostedPool(hosted=pool))
    assert engine_environment(plan.boot, "/run", {})["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "--no-async-scheduling" not in arguments.engine_arguments(plan)
    config = arguments.speculative_config(plan)
    assert config is not None
    assert product == "cpu" or config["method"] in {"ngram_gpu", "eagle3", "draft_model"}, "asynchronous in vLLM"


@pytest.mark.parametrize(
    "extra", ["--max-cudagraph-capture-size=256", "--compilation_config={}", "--cudagraph-capture-sizes=1"]
)
def test_graphs_named_by_the_user_are_used(extra: str) -> None:
    """vLLM refuses sizes in two arguments, so the pod would fail repeatedly over one that is not the user's."""
    boot = on_gpu(boot_config([lookup()]), extra_args=[extra])
    engine_arguments = arguments.engine_arguments(plan_of(boot, HostedPool(hosted=(lookup(),))))
    assert [argument for argument in engine_arguments if "capture-size" in argument or "compilation" in argument] == [
        extra
    ]


def test_what_the_pod_sets_wins_over_our_defaults() -> None:
    """Promise: engine.env and the pod's environment are the user's."""
    boot = boot_config([draft_model(HEAD)])
    boot = boot.model_copy(update={"engine": Engine(env=[EnvVar(name="VLLM_CPU_KVCACHE_SPACE", value="7")])})
    environment = engine_environment(boot, "/run/outrider", {"VLLM_CPU_OMP_THREADS_BIND": "0-3"})
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment
    assert environment["OUTRIDER_RUN_DIR"] == "/run/outrider"


@pytest.mark.parametrize("argument", [["--kv-cache-memory-bytes=1000"], ["--kv_cache_memory_bytes", "1000"]])
def test_a_cpu_cache_in_bytes_is_the_users(argument: list[str]) -> None:
    """Bug: our default stands in a variable, which vLLM takes before the argument."""
    boot = boot_config([lookup()])
    for extra_args, default in ([], True), (argument, False):
        ours = engine_environment(
            boot.model_copy(update={"engine": Engine(extra_args=extra_args)}), "/run/outrider", {}
        )
        assert ("VLLM_CPU_KVCACHE_SPACE" in ours) == default


@pytest.mark.parametrize(("limit", "gib"), [(None, 2), (1 << 30, 1), (16 << 30, 4)])
def test_the_cpu_cache_leaves_room_for_the_rest_of_the_pod(limit: int | None, gib: int) -> None:
    """Bug: vLLM's own default takes 90% of the node's memory, whatever the pod's limit."""
    assert cpu_cache_gib(limit) == gib


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", ""])
def test_an_untested_vllm_is_refused_with_the_tested_ones_named(version: str) -> None:
    """Promise: refuse to start with a sentence, not fail in a user's request."""
    with pytest.raises(UntestedEngineError, match=r"0\.32"):
        check_engine_version(version)


@pytest.mark.parametrize("version", ["0.32.4", "0.33.0+cpu"])
def test_a_tested_vllm_is_accepted(version: str) -> None:
    assert check_engine_version(version) == version


def test_the_engine_core_finds_the_plan_in_the_run_folder(tmp_path: Path) -> None:
    """Promise: one environment variable is all that crosses to vLLM's processes."""
    plan = plan_of(boot_config([lookup()]), HostedPool(hosted=(lookup(),)))
    plan = plan.model_copy(update={"paths": Paths(run_dir=str(tmp_path / "run"))})
    environ: dict[str, str] = {}
    launch.prepare(plan, environ)
    assert launch.load_plan(environ) == plan
    assert json.loads((tmp_path / "run" / launch.PLAN_FILE).read_text())["boot"]["service"] == "chat"


def test_drafter_that_the_worker_cannot_host_is_reported(tmp_path: Path) -> None:
    """Promise: a drafter never keeps a pod down; the state names it with the reason. Earlier starts are forgotten."""
    plan = plan_of(boot_config([lookup(), eagle(HEAD)]), HostedPool(hosted=(lookup(), eagle(HEAD))))
    plan = plan.model_copy(update={"paths": Paths(run_dir=str(tmp_path))})
    assert launch.noted_failures(plan) == {}
    environ: dict[str, str] = {}
    launch.prepare(plan, environ)
    launch.note_failure("eagle", "weights are cut off", environ)
    launch.note_failure("pld", "no room", environ)
    assert launch.noted_failures(plan) == {"eagle": "weights are cut off", "pld": "no room"}
    launch.prepare(plan, environ)
    assert launch.noted_failures(plan) == {}


@pytest.mark.parametrize("order", [("cause", "elsewhere"), ("elsewhere", "cause")])
def test_the_rank_that_failed_knows_the_reason(
    tmp_path: Path, order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one node write the same file. On a node without a failure the engine core knew of none, and ordered
    proposals of a drafter that all ranks had left out."""
    plan = plan_of(boot_config([lookup()]), HostedPool(hosted=(lookup(),)))
    plan = plan.model_copy(update={"paths": Paths(run_dir=str(tmp_path))})
    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    for note in order:
        if note == "cause":
            launch.note_failure("pld", "no room")
        else:
            launch.note_failure_elsewhere("pld")
    assert launch.noted_failures(plan) == {"pld": "no room"}
    launch.prepare(plan, {})
    launch.note_failure_elsewhere("pld")
    assert "on another node" in launch.noted_failures(plan)["pld"]


def test_a_drafter_that_vllms_config_refuses_is_left_out(tmp_path: Path) -> None:
    """vLLM checks some of a draft before any worker starts."""
    plan = plan_of(boot_config([eagle(HEAD)]), HostedPool(hosted=(eagle(HEAD),)))
    plan = plan.model_copy(update={"paths": Paths(run_dir=str(tmp_path))})
    refusal = ValueError("1 validation error for SpeculativeConfig\n  Value error, no such architecture")
    smaller = launch.after_failure(plan, refusal)
    assert smaller is not None
    assert "no such architecture" in smaller.pool.dropped["eagle"]
    assert launch.after_failure(plan, ValueError("out of memory")) is None


def test_drafters_noted_before_the_engine_ended_stay_out_next(tmp_path: Path) -> None:
    """It notes those that leave no room for KV, and vLLM ends; a second end without a note is no drafter's fault."""
    hosted = (lookup(), eagle(HEAD), draft_model(HEAD))
    plan = plan_of(boot_config(hosted), HostedPool(hosted=hosted))
    plan = plan.model_copy(update={"paths": Paths(run_dir=str(tmp_path))})
    launch.note_failure("draft", "it does not fit", {"OUTRIDER_RUN_DIR": str(tmp_path)})
    smaller = launch.after_failure(plan, RuntimeError("engine core initialization failed"))
    assert smaller is not None
    assert smaller.pool == HostedPool(hosted=hosted[:2], dropped={"draft": "it does not fit"})
    assert launch.after_failure(smaller, RuntimeError("engine core initialization failed")) is None
