"""Tensor parallelism: what one rank leaves out all leave out, or the others wait in a collective for ever."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed

Agreement = Callable[[bool], bool]
"""Whether something failed on this rank -> whether it did on any. Every rank asks at the same places."""


def alone(failed: bool) -> bool:
    """One rank has nobody to agree with."""
    return failed


def among(group: distributed.ProcessGroup) -> Agreement:
    """Through the ranks' group on the CPU, so that nobody waits for a device: some ten microseconds on one machine."""
    if distributed.get_world_size(group) == 1:
        return alone

    def failed_anywhere(failed: bool) -> bool:
        failures = torch.tensor([int(failed)], dtype=torch.int32)
        distributed.all_reduce(failures, op=distributed.ReduceOp.MAX, group=group)
        return bool(failures.item())

    return failed_anywhere
