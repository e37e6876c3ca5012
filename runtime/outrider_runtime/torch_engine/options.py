"""The arguments of `spec.engine.extraArgs`; their names and meaning are vLLM's."""

from __future__ import annotations

import argparse
from typing import NamedTuple, NoReturn

from outrider_crds.spec import Engine

from outrider_runtime.torch_engine.architecture import UnsupportedModelError


class Options(NamedTuple):
    """The engine's limits."""

    max_num_seqs: int
    """Requests that run at once."""
    max_num_batched_tokens: int
    """Tokens of one step."""
    kv_cache_memory_bytes: int | None
    """None: a share of the available memory."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        known = ", ".join(self._option_string_actions)
        raise UnsupportedModelError(f"spec.engine.extraArgs: {message}; the Torch backend takes {known}")


def read_options(engine: Engine) -> Options:
    """Parse the engine's arguments. Raises UnsupportedModelError, which names the field."""
    if engine.tensor_parallel_size > 1:
        raise UnsupportedModelError("spec.engine.tensorParallelSize: the Torch backend runs on one device; use vLLM")
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-num-seqs", type=_positive, default=32)
    parser.add_argument("--max-num-batched-tokens", type=_positive, default=1024)
    parser.add_argument("--kv-cache-memory-bytes", type=_positive)
    parser.add_argument("--enforce-eager", action="store_true")  # accepted for vLLM's sake: this engine is always eager
    read = parser.parse_args(engine.extra_args)
    options = Options(read.max_num_seqs, read.max_num_batched_tokens, read.kv_cache_memory_bytes)
    if options.max_num_batched_tokens < options.max_num_seqs:
        parser.error(
            f"--max-num-batched-tokens is {options.max_num_batched_tokens}, which is less than --max-num-seqs, "
            f"{options.max_num_seqs}: a step must have a token for each request"
        )
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return number
