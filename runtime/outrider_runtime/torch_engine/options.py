"""`spec.engine.extraArgs`: names and meaning are vLLM's."""

from __future__ import annotations

import argparse
from typing import NamedTuple, NoReturn

from outrider_crds.spec import Engine

from outrider_runtime.torch_engine.architecture import UnsupportedModelError


class Options(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None
    """None: a share of what there is."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        known = ", ".join(self._option_string_actions)
        raise UnsupportedModelError(f"spec.engine.extraArgs: {message}; the Torch backend takes {known}")


def read_options(engine: Engine) -> Options:
    """Raises UnsupportedModelError, which names the field."""
    if engine.tensor_parallel_size > 1:
        raise UnsupportedModelError("spec.engine.tensorParallelSize: the Torch backend runs on one device; use vLLM")
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-num-seqs", type=_positive, default=32)
    parser.add_argument("--max-num-batched-tokens", type=_positive, default=1024)
    parser.add_argument("--kv-cache-memory-bytes", type=_positive)
    parser.add_argument("--enforce-eager", action="store_true")  # it always is
    read = parser.parse_args(engine.extra_args)
    options = Options(read.max_num_seqs, read.max_num_batched_tokens, read.kv_cache_memory_bytes)
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
