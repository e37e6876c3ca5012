"""Tensor parallelism: what one rank leaves out all leave out, or the others wait in a collective for ever."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import torch
from torch import distributed


class Failed(Enum):
    NOWHERE = auto()
    SOMEWHERE = auto()
    EVERYWHERE = auto()


class RanksDisagreeError(RuntimeError):
    """A drafter has failed on some ranks in the midst of its passes. The others wait there for these ranks' part of a
    sum, and would get that of the target's next step: the engine ends, at once and on all ranks."""

    def __init__(self, drafter: str, failure: str) -> None:
        where = f"on this rank alone ({failure})" if failure else "on another rank alone"
        super().__init__(f"drafter {drafter} failed {where}, so the ranks are out of step; the engine starts again")


Agreement = Callable[[bool], Failed]
"""Whether something failed on this rank -> where it did. Every rank asks at the same places."""


def alone(failed: bool) -> Failed:
    """One rank has nobody to agree with."""
    return Failed.EVERYWHERE if failed else Failed.NOWHERE


def among(group: distributed.ProcessGroup) -> Agreement:
    """Through the ranks' group on the CPU, so that nobody waits for a device: some ten microseconds on one machine.

    A rank comes here while the device still waits in a sum of the drafter's: the host only launches those. Where it
    would wait itself, on CPUs, there is no tensor parallelism.
    """
    ranks = distributed.get_world_size(group)
    if ranks == 1:
        return alone

    def where(failed: bool) -> Failed:
        failures = torch.tensor([int(failed)], dtype=torch.int32)
        distributed.all_reduce(failures, op=distributed.ReduceOp.SUM, group=group)
        count = int(failures.item())
        return Failed.NOWHERE if count == 0 else Failed.EVERYWHERE if count == ranks else Failed.SOMEWHERE

    return where
