"""From a service's configuration to an engine that runs: its models, its memory, its limits."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, HotConfig, draft_mount
from outrider_crds.spec import Drafter as Spec
from outrider_crds.spec import DraftMethod, Dtype, ModelRef
from outrider_crds.state import DrafterMemory, Verification

from outrider_runtime.control.warm_up import compile_all
from outrider_runtime.drafters.pool import choose_pool
from outrider_runtime.identity import cpu_name, weights_commit
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.profiles import Identity
from outrider_runtime.loop.reporter import Reporter
from outrider_runtime.memory_limit import GIB, cpu_cache_gib, memory_limit_bytes
from outrider_runtime.model_config import config_file
from outrider_runtime.paths import Paths
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.drafting import Drafter
from outrider_runtime.torch_engine.drafts.beam import WIDEST
from outrider_runtime.torch_engine.drafts.draft_model import DraftModel
from outrider_runtime.torch_engine.drafts.eagle import Eagle
from outrider_runtime.torch_engine.drafts.medusa import Medusa
from outrider_runtime.torch_engine.drafts.prompt_lookup import PromptLookup
from outrider_runtime.torch_engine.engine import Engine, Models
from outrider_runtime.torch_engine.kv_pool import FIRST_TOKENS, Holder, KVPool
from outrider_runtime.torch_engine.runner import Model, Segment
from outrider_runtime.torch_engine.scheduler import TARGET, Limits
from outrider_runtime.torch_engine.text import Text
from outrider_runtime.worker_notes import write_drafter_memory, write_verification

logger = logging.getLogger(__name__)
DEVICE_SHARE = 0.8
"""Of a GPU's free memory, once the weights are there, that KV takes."""
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.gguf"]


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: Engine
    text: Text
    vocabulary: int
    loop: ControlLoop
    identity: Identity
    reporter: Reporter
    """Not started yet."""


def load(boot: BootConfig, hot: HotConfig, paths: Paths) -> Loaded:
    """Raises UnsupportedModelError with a sentence where the service cannot be served."""
    options = _options(boot)
    device = torch.device("cpu" if boot.accelerator.on_cpu else "cuda")
    folder = _folder(boot.target, paths, TARGET_MOUNT)
    target = Model(folder, TARGET, dtype=_dtype(boot), device=device)
    _try(target, folder)
    text = Text(folder, target.shape.vocabulary)
    pool = KVPool(_kv_bytes(options, device))
    pool.add_model(target.cache.bytes_per_token)
    longest = pool.longest = _longest(boot, target, pool)
    hosted, drafters, left_out = _drafters(boot, paths, target, pool)
    write_drafter_memory(paths.run_dir, _memory(hosted, drafters, target))
    write_verification(paths.run_dir, Verification.VARLEN)
    loop = ControlLoop(
        boot, hot, hosted, max_requests=options.max_num_seqs, left_out=left_out, widest=WIDEST
    )  # fmt: skip
    compile_all(loop.settings)
    limits = Limits(options.max_num_seqs, options.max_num_batched_tokens)
    models = Models(target, drafters, _layers_read(drafters))
    device_name = cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    identity = Identity(device_name, f"torch-{torch.__version__}", weights_commit(str(folder), boot.target.revision))
    reporter = Reporter(loop, paths, hot, identity, started_at=time.time())
    engine = Engine(models, pool, loop, limits, longest)
    return Loaded(engine, text, target.shape.vocabulary, loop, identity, reporter)


def _options(boot: BootConfig) -> argparse.Namespace:
    """`engine.extraArgs`; names and meaning are vLLM's."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UnsupportedModelError(f"spec.engine.extraArgs: {message}; the Torch backend takes {known}")

    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-num-seqs", type=_positive, default=32)
    parser.add_argument("--max-num-batched-tokens", type=_positive, default=1024)
    parser.add_argument("--kv-cache-memory-bytes", type=_positive)
    parser.add_argument("--enforce-eager", action="store_true")  # it always is
    known = ", ".join(parser._option_string_actions)
    if boot.engine.tensor_parallel_size > 1:
        raise UnsupportedModelError("spec.engine.tensorParallelSize: the Torch backend runs on one device; use vLLM")
    options = parser.parse_args(boot.engine.extra_args)
    if options.max_num_batched_tokens < options.max_num_seqs:
        parser.error(
            f"--max-num-batched-tokens is {options.max_num_batched_tokens}: a step has no token for each of the "
            f"{options.max_num_seqs} requests of --max-num-seqs"
        )
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return number


def _folder(model: ModelRef, paths: Paths, mount: str) -> Path:
    location = paths.models.location(model, mount)
    if Path(location).is_absolute():
        return Path(location)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(location, revision=model.revision, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub's errors share no base class; any of them means "not there"
        raise UnsupportedModelError(f"model {location!r} cannot be had from the hub: {error}") from None


def _dtype(boot: BootConfig) -> torch.dtype | None:
    """None: as the weights are stored."""
    dtype: torch.dtype | None = None if boot.engine.dtype is Dtype.AUTO else getattr(torch, boot.engine.dtype.value)
    return dtype


def _try(target: Model, folder: Path) -> None:
    """One token: a configuration may have what nobody thought of."""
    holder = Holder(TARGET, "one token")
    pool = KVPool(target.cache.bytes_per_token * FIRST_TOKENS, [target.cache.bytes_per_token])
    pool.grow(holder, 1)
    try:
        target.decoder.logits(target.run([Segment(holder.request, [0], 0)], pool).last)
    except Exception as error:  # whatever torch makes of sizes that do not fit each other
        raise UnsupportedModelError(f"{config_file(folder)}: the model cannot be run: {error}") from None
    target.cache.forget(holder.request)


def _kv_bytes(options: argparse.Namespace, device: torch.device) -> int:
    if options.kv_cache_memory_bytes is not None:
        return int(options.kv_cache_memory_bytes)
    if device.type == "cpu":
        return cpu_cache_gib(memory_limit_bytes()) * GIB
    return int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])


def _longest(boot: BootConfig, target: Model, pool: KVPool) -> int:
    """Tokens of a request, its prompt's included: alone, it must find room."""
    asked, most = boot.engine.max_model_len, target.shape.positions
    if asked is not None and asked > most:
        raise UnsupportedModelError(
            f"spec.engine.maxModelLen is {asked}, and the model has {most} positions (max_position_embeddings)"
        )
    room = pool.free_tokens(TARGET)
    if room < (asked or 1):
        raise UnsupportedModelError(
            f"spec.engine.maxModelLen: the KV cache has room for {room} tokens; lower it, or raise "
            "--kv-cache-memory-bytes in spec.engine.extraArgs"
        )
    return min(asked or most, room)


def _drafters(
    boot: BootConfig, paths: Paths, target: Model, pool: KVPool
) -> tuple[list[Spec], list[Drafter], dict[str, str]]:
    """Those that can be hosted, and why the others are left out: a drafter never keeps a service down."""
    chosen = choose_pool(boot, paths.models)
    hosted, drafters, left_out = list[Spec](), list[Drafter](), dict(chosen.dropped)
    for spec in chosen.hosted:
        try:
            drafters.append(_drafter(spec, paths, target, pool, len(hosted) + 1))
            hosted.append(spec)
        except UnsupportedModelError as error:
            left_out[spec.name] = str(error)
        except Exception as error:  # whatever its files make their readers stumble over
            left_out[spec.name] = f"it cannot be started: {type(error).__name__}: {error}"
    for name, reason in left_out.items():
        logger.warning("drafter %r is not used: %s", name, reason)
    return hosted, drafters, left_out


def _drafter(spec: Spec, paths: Paths, target: Model, pool: KVPool, number: int) -> Drafter:
    """number: its place among the models of the KV pool."""
    if spec.prompt_lookup is not None:
        pool.add_model(0)
        return PromptLookup(spec.prompt_lookup.min_tokens, spec.prompt_lookup.max_tokens)
    assert spec.neural is not None
    folder = _folder(spec.neural.model, paths, draft_mount(spec.name))
    if spec.method is DraftMethod.EAGLE:
        head = Eagle(folder, number, target, pool)
        pool.add_model(head.cache.bytes_per_token)
        return head
    if spec.method is DraftMethod.MEDUSA:
        pool.add_model(0)
        return Medusa(folder, target)
    model = Model(folder, number, dtype=target.dtype, device=target.device)
    pool.add_model(model.cache.bytes_per_token)
    return DraftModel(model, pool)


def _memory(hosted: list[Spec], drafters: list[Drafter], target: Model) -> dict[str, DrafterMemory]:
    """Of drafters that have a model."""
    sizes = {}
    for spec, one in zip(hosted, drafters, strict=True):
        if isinstance(one, DraftModel):
            sizes[spec.name] = one.model.weight_bytes, one.model.cache.bytes_per_token
        elif isinstance(one, Eagle):
            sizes[spec.name] = one.head.weight_bytes, one.cache.bytes_per_token
        elif isinstance(one, Medusa):
            sizes[spec.name] = one.head.weight_bytes, 0
    a_token = target.cache.bytes_per_token + sum(kv for _, kv in sizes.values())
    return {
        name: DrafterMemory(
            weight_bytes=weights, kv_bytes_per_token=kv, concurrency_percent=100 * (a_token - kv) / a_token
        )
        for name, (weights, kv) in sizes.items()
    }


def _layers_read(drafters: list[Drafter]) -> tuple[int, ...]:
    """Of the target, by heads."""
    return tuple(sorted({layer for one in drafters if isinstance(one, Eagle | Medusa) for layer in one.head.layers}))
