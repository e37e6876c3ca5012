"""Starts vLLM with the plugin in this process, the way the server and the profiler do."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from outrider_crds.draft_pool import (
    MTP,
    BlockDraft,
    DrafterSpec,
    DraftMethod,
    DraftModel,
    NeuralDraft,
    PromptLookup,
    SparseSelf,
    Suffix,
    SuffixScope,
)
from outrider_crds.model_sources import HostPathSource, ModelRef, ModelSource
from outrider_crds.runtime_config import BootConfig, HotConfig
from outrider_crds.spec import Accelerator, DraftPrefillMode, Dtype, Engine, SLOClassSpec, SpeculationMode
from outrider_runtime.loop import drafter_availability
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.steps import FinishedStep
from outrider_runtime.paths import Paths
from outrider_runtime.vllm_plugin import arguments as arguments_
from outrider_runtime.vllm_plugin import launch

from setup.drafts import SHIPPED_HEAD

MODELS = Path.home() / ".cache/outrider/models"
TARGET = MODELS / "smollm2-135m-instruct"
POOR_DRAFT = MODELS / "smollm2-135m-first-layers"
SMALL = MODELS / "smollm2-135m-few-layers"
"""A target of six layers, for tests that ask nothing of an answer but that it stays the same: a fifth of the time."""
SMALL_LAYERS = (1, 2, 4)
"""Layers of the small target that a head reads."""
EAGLE_HEAD = SHIPPED_HEAD
OUTPUT_TOKENS = 24
"""Default output tokens of a request; each has its full length."""
SMALL_CACHE = "--kv-cache-memory-bytes=268435456"
"""Size of the KV cache. An engine of CPUs writes all of it at its start, and several run side by side."""
DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")
"""Device of the engines in these tests: "gpu" runs them on one; CONTRIBUTING.md says how."""
DEVICE_ARGUMENTS = shlex.split(os.environ.get("OUTRIDER_TEST_DEVICE_ARGUMENTS", "--enforce-eager"))
ENGINE_ARGUMENTS = (
    "--max-model-len=1024",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=512",
    SMALL_CACHE,
    *DEVICE_ARGUMENTS,
)


def windowed(folder: Path, source: Path = SMALL) -> Path:
    """A Llama as a model whose layers forget all but the last 64 tokens; made in `folder`."""
    made = folder / "windowed"
    shutil.copytree(source, made)
    config = json.loads((made / "config.json").read_text())
    changed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (made / "config.json").write_text(json.dumps({**config, **changed}))
    return made


def interleaved(folder: Path, target: Path = SMALL) -> Path:
    """A Llama as a model of which every other layer forgets all but the last 64 tokens; made in `folder`."""
    made = folder / "interleaved"
    shutil.copytree(target, made)
    config = json.loads((made / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    (made / "config.json").write_text(json.dumps({**config, "layer_types": kinds, "sliding_window": 64}))
    return made


def head_reading(layers: Sequence[int], folder: Path) -> Path:
    """Copy of the EAGLE-3 head that reads these layers of its target; without them it needs a target of 30."""
    shutil.copytree(EAGLE_HEAD, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": list(layers)}))
    return folder


def model(path: Path) -> ModelRef:
    return ModelRef(name=path.name, source=ModelSource(host_path=HostPathSource(path=str(path))))


def lookup(name: str = "pld") -> DrafterSpec:
    return DrafterSpec(
        name=name, method=DraftMethod.PROMPT_LOOKUP, prompt_lookup=PromptLookup(min_tokens=2, max_tokens=4)
    )


def suffix(name: str = "suffix", scope: SuffixScope = SuffixScope.REQUEST) -> DrafterSpec:
    return DrafterSpec(name=name, method=DraftMethod.SUFFIX, suffix=Suffix(scope=scope))


def eagle(path: Path = EAGLE_HEAD, name: str = "eagle") -> DrafterSpec:
    return DrafterSpec(name=name, method=DraftMethod.EAGLE, eagle=NeuralDraft(model=model(path)))


def block(path: Path, name: str = "flash", max_tokens: int | None = None) -> DrafterSpec:
    return DrafterSpec(name=name, method=DraftMethod.BLOCK, block=BlockDraft(model=model(path), max_tokens=max_tokens))


def mtp(name: str = "mtp") -> DrafterSpec:
    return DrafterSpec(name=name, method=DraftMethod.MTP, mtp=MTP())


def medusa(path: Path, name: str = "medusa") -> DrafterSpec:
    return DrafterSpec(name=name, method=DraftMethod.MEDUSA, medusa=NeuralDraft(model=model(path)))


def draft_model(path: Path, name: str = "draft", window_tokens: int | None = None) -> DrafterSpec:
    block = DraftModel(model=model(path), window_tokens=window_tokens)
    return DrafterSpec(name=name, method=DraftMethod.DRAFT_MODEL, draft_model=block)


def sparse_self(window_tokens: int, name: str = "self", sink_tokens: int = 16) -> DrafterSpec:
    block = SparseSelf(sink_tokens=sink_tokens, window_tokens=window_tokens)
    return DrafterSpec(name=name, method=DraftMethod.SPARSE_SELF, sparse_self=block)


def hot_config(mode: SpeculationMode = SpeculationMode.CLOSED_LOOP, max_draft_tokens: int = 3) -> HotConfig:
    return HotConfig(
        mode=mode,
        draft_prefill=DraftPrefillMode.AUTO,
        max_draft_tokens=max_draft_tokens,
        slo_classes=[SLOClassSpec(name="chat", tpot="10s", ttft="100s"), SLOClassSpec(name="instant", tpot="1us")],
        default_slo_class="chat",
    )


def boot_config(
    drafters: Sequence[DrafterSpec], max_draft_tokens: int = 3, extra: Sequence[str] = (), target: Path = TARGET
) -> BootConfig:
    return BootConfig(
        service="chat",
        namespace="default",
        revision="local",
        target=model(target),
        draft_pool=list(drafters),
        accelerator=Accelerator(products=[DEVICE]),
        # Whole numbers of float32 do not depend on how many tokens share a pass; those of bfloat16 may.
        engine=Engine(dtype=Dtype.FLOAT32, extra_args=[*ENGINE_ARGUMENTS, *extra]),
        max_draft_tokens=max_draft_tokens,
    )


def make_plan(
    drafters: Sequence[DrafterSpec], hot: HotConfig | None = None, extra: Sequence[str] = (), target: Path = TARGET
) -> launch.LaunchPlan:
    run_dir = tempfile.mkdtemp(prefix="outrider-test-")
    hot = hot or hot_config()
    paths = Paths(
        hot_file=f"{run_dir}/hot.json", profiles_dir=f"{run_dir}/profiles", podinfo_dir=run_dir, run_dir=run_dir,
        mounted=False,
    )  # fmt: skip
    return launch.plan_launch(boot_config(drafters, extra=extra, target=target), hot, paths)


@contextmanager
def own_environment(**variables: str) -> Iterator[None]:
    """What an engine's start sets in the environment, and `variables`, end with the block: other tests start
    servers with this process's environment. vLLM keeps what it has read, so that is forgotten, too."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        vllm_variables: Any = importlib.import_module("vllm.envs")
        vllm_variables.disable_envs_cache()


@contextmanager
def engine(plan: launch.LaunchPlan) -> Iterator[Any]:
    """A `vllm.LLM` in this process; closed again with its threads and its distributed state, its run folder removed.
    After a start that failed the folder stays: it has the notes for the next start."""
    with own_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR"):
        launch.prepare(plan)
        hide_dunders_of_llvmlite()
        with small_heap(), suspensions_without_end():
            llm = start(arguments_.engine_arguments(plan))
            try:
                yield llm
            finally:
                stop(llm)
                shutil.rmtree(plan.paths.run_dir, ignore_errors=True)


@contextmanager
def suspensions_without_end() -> Iterator[None]:
    """A request may take longer than a suspension on a busy machine, and a test that looks afterwards sees none."""
    with mock.patch.multiple(drafter_availability, FIRST_SUSPENSION_S=math.inf, LONGEST_SUSPENSION_S=math.inf):
        yield


@contextmanager
def small_heap() -> Iterator[None]:
    """vLLM collects garbage a dozen times while an engine starts and stops: among what came since the imports, whose
    half a million objects would take 0.4 s each time. They stay out of it as long as the process lives."""
    _freeze_imports()
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"):
        yield


@functools.cache
def _freeze_imports() -> None:
    importlib.import_module("vllm.entrypoints.llm")
    gc.collect()  # what is garbage by now is not to stay
    gc.freeze()


def hide_dunders_of_llvmlite() -> None:
    """vLLM looks at the `__dict__` of everything that is imported when it starts; llvmlite's library object (there
    since an engine before this one compiled with numba) answers with a function, and vLLM falls over it."""
    library: Any = type(importlib.import_module("llvmlite.binding.ffi").lib)
    resolve = library.__getattr__

    def resolve_functions(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return resolve(self, name)

    library.__getattr__ = resolve_functions


def start(arguments: list[str]) -> Any:
    """`vllm.LLM` from the server's own argument list."""
    from outrider_runtime.vllm_plugin.versions import make_arg_parser
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments_.prepare_vllm(worker_is_here=True)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", *arguments])
    return LLM.from_engine_args(EngineArgs.from_cli_args(parsed))


def stop(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    ctypes.CDLL(None).malloc_trim(0)  # weights leave gaps in the heap, which a process of many engines would keep


RequestArguments = tuple[str, dict[str, Any]]
"""A prompt, and what it says of sampling."""


class Verified(NamedTuple):
    """What came of one request's proposals in a step."""

    id: str
    drafter: str
    """Drafter of the proposal; without one, the first in the order."""
    planned_tokens: int
    """Tokens that were planned."""
    proposed: int
    verified: int
    accepted: int
    first: str
    """First drafter in the order."""


def verified(finished: FinishedStep, drafters: Sequence[str]) -> list[Verified]:
    """Return the results of each request with a planned proposal."""
    outcome, request_steps = finished.outcome, list[Verified]()
    forest = outcome.forest
    for row, name in enumerate(finished.step.names):
        nodes = forest.request == row
        ranks = [number for number in forest.drafter_order[:, row].tolist() if number >= 0]
        if not ranks:
            continue
        drafter = int(forest.drafter[nodes][0]) if nodes.any() else ranks[0]
        proposed, scored, kept = (int(flags[nodes].sum()) for flags in (nodes, outcome.verified, outcome.accepted))
        planned_tokens = int(forest.lengths[drafter])
        request_steps.append(
            Verified(name, drafters[drafter], planned_tokens, proposed, scored, kept, drafters[ranks[0]])
        )
    return request_steps


class Bench:
    """An engine in this process, driven step by step; what its loop saw is kept in `steps`."""

    def __init__(self, llm: Any, plan: launch.LaunchPlan) -> None:
        self.llm = llm
        self.plan = plan
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.loop: ControlLoop = self.scheduler.outrider
        self.steps: list[FinishedStep] = []
        self.loop.listeners.append(self.steps.append)

    def fresh(self) -> None:
        """Forget what earlier tests left: pins, steps, cached prefixes."""
        self.loop.pin(None)
        self.steps.clear()
        self.llm.reset_prefix_cache()

    def generate(self, prompts: Sequence[str], *, arrive_every: int = 0, **sampling: Any) -> list[list[int]]:
        """Tokens of each prompt; `arrive_every` steps between arrivals, so that the batch changes all the time."""
        return self.run([(prompt, sampling) for prompt in prompts], arrive_every=arrive_every)

    def run(self, requests: Sequence[RequestArguments], **how: Any) -> list[list[int]]:
        """Tokens per request; none of one that was aborted before it had any. how: as `outputs` takes it."""
        return [[] if output is None else list(output.outputs[0].token_ids) for output in self.outputs(requests, **how)]

    def outputs(
        self,
        requests: Sequence[RequestArguments],
        *,
        arrive_every: int = 0,
        before_step: Callable[[int], None] = lambda _step: None,
        abort_at: Mapping[int, str] | None = None,
        adapters: Mapping[int, Any] | None = None,
    ) -> list[Any]:
        """vLLM's last output of each request; requests are called "0", "1", ... for `abort_at` (step -> request).
        adapters: place of a request -> its LoRARequest."""
        engine, last = self.llm.llm_engine, dict.fromkeys(map(str, range(len(requests))))
        waiting = list(enumerate(requests))
        step = 0
        while waiting or engine.has_unfinished_requests():
            while waiting and step >= waiting[0][0] * arrive_every:
                index, (prompt, sampling) = waiting.pop(0)
                adapter = (adapters or {}).get(index)
                engine.add_request(str(index), prompt, _sampling(sampling), lora_request=adapter)
            if abort_at and step in abort_at:
                engine.abort_request([abort_at[step]])
            before_step(step)
            for output in engine.step():
                last[output.request_id] = output
            step += 1
        return list(last.values())

    @property
    def outcomes(self) -> list[Verified]:
        """Results of each request in each step."""
        names = list(self.loop.numbers)
        return [request_step for step in self.steps for request_step in verified(step, names)]

    def accepted(self, drafter: str) -> int:
        return sum(outcome.accepted for outcome in self.outcomes if outcome.drafter == drafter)

    def verified(self, drafter: str | None = None) -> int:
        return sum(flags.verified for flags in self.outcomes if drafter is None or flags.drafter == drafter)


def _sampling(sampling: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True} | sampling)


@contextmanager
def bench(drafters: Sequence[DrafterSpec], *, asynchronous: bool = False, **plan: Any) -> Iterator[Bench]:
    made = make_plan(drafters, **plan)
    with _asynchronous_scheduling() if asynchronous else nullcontext(), engine(made) as llm:
        yield Bench(llm, made)


@contextmanager
def _asynchronous_scheduling() -> Iterator[None]:
    """Asynchronous scheduling, as on GPUs. vLLM switches it off on CPUs, where it gains nothing, though it works."""
    platform = type(importlib.import_module("vllm.platforms").current_platform)
    check = platform.check_and_update_config

    def checked(_platform: type, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with mock.patch.object(platform, "check_and_update_config", classmethod(checked)):
        yield
