"""Starts vLLM with the plugin in this process, the way the server and the profiler do."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider_crds.runtime_config import BootConfig, HotConfig
from outrider_crds.spec import (
    Accelerator,
    Drafter,
    DraftMethod,
    DraftPrefill,
    Engine,
    HostPathSource,
    ModelRef,
    ModelSource,
    NeuralDraft,
    PromptLookup,
    SLOClass,
    SpeculationMode,
)
from outrider_runtime.vllm_plugin import launch

MODELS = Path.home() / ".cache/outrider/models"
TARGET = MODELS / "smollm2-135m-instruct"
EAGLE_HEAD = Path(__file__).parents[2] / "examples/models/smollm2-135m-eagle3"
ENGINE_ARGUMENTS = ("--max-model-len=1024", "--max-num-seqs=16", "--max-num-batched-tokens=512", "--enforce-eager")


def model(path: Path) -> ModelRef:
    return ModelRef(name=path.name, source=ModelSource(host_path=HostPathSource(path=str(path))))


def lookup(name: str = "pld") -> Drafter:
    return Drafter(name=name, method=DraftMethod.PROMPT_LOOKUP, prompt_lookup=PromptLookup(min_tokens=2, max_tokens=4))


def eagle(path: Path = EAGLE_HEAD, name: str = "eagle") -> Drafter:
    return Drafter(name=name, method=DraftMethod.EAGLE, eagle=NeuralDraft(model=model(path)))


def draft_model(path: Path, name: str = "draft") -> Drafter:
    return Drafter(name=name, method=DraftMethod.DRAFT_MODEL, draft_model=NeuralDraft(model=model(path)))


def hot_config(mode: SpeculationMode = SpeculationMode.CLOSED_LOOP, max_draft_tokens: int = 3) -> HotConfig:
    return HotConfig(
        mode=mode,
        draft_prefill=DraftPrefill.AUTO,
        max_draft_tokens=max_draft_tokens,
        slo_classes=[SLOClass(name="chat", tpot="10s", ttft="100s"), SLOClass(name="instant", tpot="1us")],
        default_slo_class="chat",
    )


def boot_config(drafters: Sequence[Drafter], max_draft_tokens: int = 3, extra: Sequence[str] = ()) -> BootConfig:
    return BootConfig(
        service="chat",
        namespace="default",
        revision="local",
        target=model(TARGET),
        draft_pool=list(drafters),
        accelerator=Accelerator(products=["cpu"]),
        engine=Engine(extra_args=[*ENGINE_ARGUMENTS, *extra]),
        max_draft_tokens=max_draft_tokens,
    )


def make_plan(
    drafters: Sequence[Drafter], hot: HotConfig | None = None, extra: Sequence[str] = ()
) -> launch.LaunchPlan:
    run_dir = tempfile.mkdtemp(prefix="outrider-test-")
    hot = hot or hot_config()
    paths = launch.Paths(
        hot_file=f"{run_dir}/hot.json", profiles_dir=f"{run_dir}/profiles", podinfo_dir=run_dir, run_dir=run_dir,
        mounted=False,
    )  # fmt: skip
    return launch.plan_launch(boot_config(drafters, extra=extra), hot, paths)


@contextmanager
def engine(plan: launch.LaunchPlan) -> Iterator[Any]:
    """A `vllm.LLM` in this process; closed again with its threads and its distributed state."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    launch.prepare(plan)
    llm = start(launch.engine_arguments(plan))
    try:
        yield llm
    finally:
        stop(llm)


def start(arguments: list[str]) -> Any:
    """`vllm.LLM` from the server's own argument list."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", *arguments])
    engine_args = EngineArgs.from_cli_args(parsed)
    return LLM.from_engine_args(engine_args)


def stop(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
