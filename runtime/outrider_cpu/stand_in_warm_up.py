"""Compiles the stand-ins before an engine is ready, so that no request waits for it."""

from __future__ import annotations

from typing import Any

ENOUGH_REQUESTS = 2


def compile_stand_ins(model_runner: Any, execute_model: Any, sample_tokens: Any) -> None:
    """Run vLLM's own warm-up: a few steps with every kind of request. Call it once the KV cache exists.

    execute_model, sample_tokens: vLLM's methods of the worker. vLLM runs the largest batch, to tune kernels for it; a
    small batch is enough here.
    """
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    limits = model_runner.scheduler_config
    most = limits.max_num_seqs
    limits.max_num_seqs = min(ENOUGH_REQUESTS, most)
    try:
        warmup_kernels(model_runner, execute_model, sample_tokens)
    finally:
        limits.max_num_seqs = most
