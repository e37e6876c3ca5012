"""Agreement among tensor-parallel ranks on failures of a drafter.

If one rank leaves a drafter out, all must: the others would wait for it in a collective forever.
"""

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
    """A drafter failed on some ranks in the middle of its passes, so the engine ends on all ranks.

    The other ranks wait for their part of an all-reduce, and would get that of the target's next step.
    """

    def __init__(self, drafter: str, failure: str) -> None:
        where = f"on this rank alone ({failure})" if failure else "on another rank alone"
        super().__init__(f"drafter {drafter} failed {where}, so the ranks are out of step; the engine starts again")


class DifferentPoolsError(RuntimeError):
    """The ranks host different drafters, since a draft is missing on a node: they would run different passes."""

    def __init__(self, pools: list[list[str]]) -> None:
        named = "; ".join(f"rank {rank}: {', '.join(pool) or 'none'}" for rank, pool in enumerate(pools))
        super().__init__(f"the ranks host different drafters ({named}); each node needs every draft model")


Agreement = Callable[[bool], Failed]
"""Takes whether something failed on this rank, and returns the ranks on which it failed. All ranks call it together."""


def alone(failed: bool) -> Failed:
    """Agree in an engine of one rank."""
    return Failed.EVERYWHERE if failed else Failed.NOWHERE


def among(group: distributed.ProcessGroup) -> Agreement:
    """Make the agreement of a process group on the CPU. It waits for no device; one call takes some ten microseconds.

    A rank comes here while its device may still wait in an all-reduce of the drafter, which the host only launches. On
    CPUs the host itself waits there.
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


def check_same_pool(drafters: list[str], group: distributed.ProcessGroup) -> None:
    """Raise DifferentPoolsError on all ranks of `group` unless `drafters` are the same on each."""
    ranks = distributed.get_world_size(group)
    if ranks == 1:
        return
    pools: list[list[str]] = [[] for _ in range(ranks)]
    distributed.all_gather_object(pools, drafters, group=group)
    if any(pool != drafters for pool in pools):
        raise DifferentPoolsError(pools)
