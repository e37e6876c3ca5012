"""Runs vLLM's own functions twice on the same random inputs: with our stand-ins, and with Triton's interpreter."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import outrider_cpu
import torch
from outrider_cpu.interpreter import RUNNER

Outcome = dict[str, Any]
"""What a case returned and what it changed: tensors, or lists of them, by name."""


def with_stand_ins_and_without(case: Callable[[torch.Generator], Outcome], seed: int) -> tuple[Outcome, Outcome]:
    os.environ.update(outrider_cpu.ENVIRONMENT)
    outrider_cpu.install()
    ours = case(torch.Generator().manual_seed(seed))
    with interpreted():
        theirs = case(torch.Generator().manual_seed(seed))
    return ours, theirs


@contextmanager
def interpreted() -> Iterator[None]:
    """vLLM's own kernels and functions are back wherever the runner has them, and Triton interprets them."""
    from outrider_cpu import replaced, sampling, verification
    from outrider_cpu.stand_in import StandIn

    functions = {
        "gumbel_sample": sampling.interpreted_gumbel_sample,
        "rejection_sample": verification.interpreted_rejection_sample,
    }
    put_back = []
    for replacement in (row for row in replaced.REPLACEMENTS if row.root == RUNNER):
        ours = getattr(importlib.import_module(f"{RUNNER}.{replacement.module}"), replacement.attribute)
        theirs = ours.kernel if isinstance(ours, StandIn) else functions[replacement.attribute]
        replaced.rebind(ours, theirs)
        put_back.append((theirs, ours))
    try:
        yield
    finally:
        for theirs, ours in put_back:
            replaced.rebind(theirs, ours)


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        for mine, their in zip(_tensors(ours[name]), _tensors(theirs[name]), strict=True):
            if their.is_floating_point():
                assert torch.allclose(mine.float(), their.float(), atol=1e-4, rtol=1e-4), (
                    f"{name}: {mine} is not {their}"
                )
            else:
                assert torch.equal(mine, their), f"{name}: {mine} is not {their}"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
