"""Loads an engine from a service's configuration: models, KV memory and limits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from outrider_crds.runtime_config import TARGET_MOUNT, BootConfig, HotConfig
from outrider_crds.runtime_state import Verification
from outrider_crds.spec import Dtype

from outrider_runtime.dtype import engine_dtype
from outrider_runtime.identity import weights_commit
from outrider_runtime.loop.compile_loop import compile_loop
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.mounted_profile import PodIdentity
from outrider_runtime.loop.reporter import Reporter
from outrider_runtime.memory_limit import GIB, cpu_cache_gib, memory_limit_bytes
from outrider_runtime.model_config import config_file
from outrider_runtime.paths import Paths
from outrider_runtime.processor import cpu_name
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.batch_scheduler import TARGET, SchedulerLimits
from outrider_runtime.torch_engine.drafts.beam import MAX_WIDTH
from outrider_runtime.torch_engine.hosting import host, model_folder
from outrider_runtime.torch_engine.inference_engine import EngineModels, InferenceEngine
from outrider_runtime.torch_engine.kv_pool import FIRST_TOKENS, Holder, KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel, Segment
from outrider_runtime.torch_engine.options import Options, read_options
from outrider_runtime.torch_engine.text import Text
from outrider_runtime.worker_notes import write_drafter_memory, write_verification

DEVICE_SHARE = 0.8
"""Share of a GPU's free memory, after the weights are loaded, that the KV cache takes; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready to run, and what its server needs."""

    engine: InferenceEngine
    text: Text
    vocabulary: int
    loop: ControlLoop
    identity: PodIdentity
    reporter: Reporter
    """Not started."""


def load(boot: BootConfig, hot: HotConfig, paths: Paths) -> Loaded:
    """Load all that the service needs. Raises UnsupportedModelError, with the reason, when it cannot be served."""
    options = read_options(boot.engine)
    device = torch.device("cpu" if boot.accelerator.on_cpu else "cuda")
    folder = model_folder(boot.target, paths, TARGET_MOUNT)
    target = CachedModel(folder, TARGET, dtype=_dtype(boot), device=device)
    _check_runs(target, folder)
    text = Text(folder, target.shape.vocabulary)
    pool = KVPool(0, [target.cache.bytes_per_token])
    hosted = host(boot, paths, target, pool)
    pool.total_bytes = _kv_bytes(options, device)  # after all weights are loaded, since KV gets what they leave
    longest = pool.longest = _longest(boot, target, pool)
    write_drafter_memory(paths.run_dir, hosted.memory(target))
    write_verification(paths.run_dir, Verification.VARLEN)
    loop = ControlLoop(
        boot, hot, hosted.specs, max_requests=options.max_num_seqs, left_out=hosted.left_out, widest=MAX_WIDTH
    )  # fmt: skip
    compile_loop(loop.settings)
    limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens)
    engine = InferenceEngine(EngineModels(target, hosted.drafters, hosted.layers), pool, loop, limits, longest)
    identity = PodIdentity(
        _device_name(device), f"torch-{torch.__version__}", weights_commit(str(folder), boot.target.revision)
    )
    reporter = Reporter(loop, paths, hot, identity, started_at=time.time())
    return Loaded(engine, text, target.shape.vocabulary, loop, identity, reporter)


def _device_name(device: torch.device) -> str:
    return cpu_name() if device.type == "cpu" else torch.cuda.get_device_name(device)


def _dtype(boot: BootConfig) -> torch.dtype | None:
    """The type that the service names; None: the one in which the weights are stored."""
    dtype = engine_dtype(boot)
    return None if dtype is Dtype.AUTO else getattr(torch, dtype.value)


def _check_runs(target: CachedModel, folder: Path) -> None:
    """Run one token through the model: a configuration may be wrong in a way that no check foresaw."""
    holder = Holder(TARGET, "check")
    pool = KVPool(target.cache.bytes_per_token * FIRST_TOKENS, [target.cache.bytes_per_token])
    pool.grow(holder, 1)
    try:
        logits = target.decoder.logits(target.run([Segment(holder.request, [0], 0)], pool).last)
    except Exception as error:  # torch raises different classes for sizes that do not match
        raise UnsupportedModelError(f"{config_file(folder)}: the model cannot be run: {error}") from None
    target.cache.forget(holder.request)
    if not logits.isfinite().all():
        raise UnsupportedModelError(
            f"{folder}: the model's logits are not finite: its weights are broken or overflow {target.dtype}"
        )


def _kv_bytes(options: Options, device: torch.device) -> int:
    """Bytes of the KV cache: the option's value, or a share of the available memory."""
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if device.type == "cpu":
        return cpu_cache_gib(memory_limit_bytes()) * GIB
    return int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])


def _longest(boot: BootConfig, target: CachedModel, pool: KVPool) -> int:
    """Tokens that prompt and answer may have together: a single request must fit into the KV cache."""
    configured = boot.engine.max_model_len
    positions = target.shape.positions
    if configured is not None and configured > positions:
        raise UnsupportedModelError(
            f"spec.engine.maxModelLen is {configured}, and the model has {positions} positions "
            "(max_position_embeddings)"
        )
    room = pool.free_tokens(TARGET)
    if room < (configured or 1):
        raise UnsupportedModelError(
            f"spec.engine.maxModelLen: the KV cache has room for {room} tokens; lower maxModelLen, or raise "
            "--kv-cache-memory-bytes in spec.engine.extraArgs"
        )
    return min(configured or positions, room)
