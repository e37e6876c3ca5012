"""From a service's configuration to an engine that runs: its models, its memory, its limits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, HotConfig
from outrider_crds.spec import Dtype
from outrider_crds.state import Verification

from outrider_runtime.control.warm_up import compile_all
from outrider_runtime.dtype import engine_dtype
from outrider_runtime.identity import weights_commit
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.profiles import Identity
from outrider_runtime.loop.reporter import Reporter
from outrider_runtime.memory_limit import GIB, cpu_cache_gib, memory_limit_bytes
from outrider_runtime.model_config import config_file
from outrider_runtime.paths import Paths
from outrider_runtime.processor import cpu_name
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.batch_scheduler import TARGET, SchedulerLimits
from outrider_runtime.torch_engine.drafts.beam import WIDEST
from outrider_runtime.torch_engine.hosting import host, model_folder
from outrider_runtime.torch_engine.inference_engine import EngineModels, InferenceEngine
from outrider_runtime.torch_engine.kv_pool import FIRST_TOKENS, Holder, KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel, Segment
from outrider_runtime.torch_engine.options import Options, read_options
from outrider_runtime.torch_engine.text import Text
from outrider_runtime.worker_notes import write_drafter_memory, write_verification

DEVICE_SHARE = 0.8
"""Of a GPU's free memory, once the weights are there, that KV takes."""


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: InferenceEngine
    text: Text
    vocabulary: int
    loop: ControlLoop
    identity: Identity
    reporter: Reporter
    """Not started yet."""


def load(boot: BootConfig, hot: HotConfig, paths: Paths) -> Loaded:
    """Raises UnsupportedModelError with a sentence where the service cannot be served."""
    options = read_options(boot.engine)
    device = torch.device("cpu" if boot.accelerator.on_cpu else "cuda")
    folder = model_folder(boot.target, paths, TARGET_MOUNT)
    target = CachedModel(folder, TARGET, dtype=_dtype(boot), device=device)
    _try(target, folder)
    text = Text(folder, target.shape.vocabulary)
    pool = KVPool(0, [target.cache.bytes_per_token])
    hosted = host(boot, paths, target, pool)
    pool.total_bytes = _kv_bytes(options, device)  # of what all weights leave
    longest = pool.longest = _longest(boot, target, pool)
    write_drafter_memory(paths.run_dir, hosted.memory(target))
    write_verification(paths.run_dir, Verification.VARLEN)
    loop = ControlLoop(
        boot, hot, hosted.specs, max_requests=options.max_num_seqs, left_out=hosted.left_out, widest=WIDEST
    )  # fmt: skip
    compile_all(loop.settings)
    limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens)
    engine = InferenceEngine(EngineModels(target, hosted.drafters, hosted.layers), pool, loop, limits, longest)
    identity = Identity(
        _device_name(device), f"torch-{torch.__version__}", weights_commit(str(folder), boot.target.revision)
    )
    reporter = Reporter(loop, paths, hot, identity, started_at=time.time())
    return Loaded(engine, text, target.shape.vocabulary, loop, identity, reporter)


def _device_name(device: torch.device) -> str:
    return cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)


def _dtype(boot: BootConfig) -> torch.dtype | None:
    """None: as the weights are stored."""
    dtype = engine_dtype(boot)
    return None if dtype is Dtype.AUTO else getattr(torch, dtype.value)


def _try(target: CachedModel, folder: Path) -> None:
    """One token: a configuration may have what nobody thought of."""
    holder = Holder(TARGET, "one token")
    pool = KVPool(target.cache.bytes_per_token * FIRST_TOKENS, [target.cache.bytes_per_token])
    pool.grow(holder, 1)
    try:
        logits = target.decoder.logits(target.run([Segment(holder.request, [0], 0)], pool).last)
    except Exception as error:  # whatever torch makes of sizes that do not fit each other
        raise UnsupportedModelError(f"{config_file(folder)}: the model cannot be run: {error}") from None
    target.cache.forget(holder.request)
    if not logits.isfinite().all():
        raise UnsupportedModelError(
            f"{folder}: the model's logits are not finite: its weights are broken, or do not fit into {target.dtype}"
        )


def _kv_bytes(options: Options, device: torch.device) -> int:
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if device.type == "cpu":
        return cpu_cache_gib(memory_limit_bytes()) * GIB
    return int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])


def _longest(boot: BootConfig, target: CachedModel, pool: KVPool) -> int:
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
