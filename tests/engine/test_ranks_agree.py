"""Tensor parallelism: a drafter that fails on one rank fails on all. Two processes, gloo."""

from __future__ import annotations

from pathlib import Path

from outrider_runtime.step_clock import HostClock
from outrider_runtime.vllm_plugin.agreement import among
from outrider_runtime.vllm_plugin.drafting_step import DraftingStep
from outrider_runtime.vllm_plugin.messages import DraftOrder, numbers
from torch import distributed
from torch.multiprocessing.spawn import spawn


def _rank(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    order = DraftOrder(1, numbers([1, 1]), numbers([0]), numbers([-1]))
    world = distributed.group.WORLD
    assert world is not None
    step = DraftingStep(order, ["a"], HostClock(), among(world))

    def fails_on_the_second() -> str:
        if rank == 1:
            raise RuntimeError("one device is out of memory")
        return "proposals"

    step.begin(["a"])
    made = [step.run(0, fails_on_the_second), step.run(1, lambda: "proposals")]
    step.end()
    Path(folder, f"rank{rank}").write_text(repr((made, step.report().failures)))
    distributed.destroy_process_group()


def test_a_drafter_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    """Bug: the exception was swallowed on one rank; the others waited in a collective, or verified other tokens."""
    spawn(_rank, args=(str(tmp_path),), nprocs=2)
    told = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert told[0] == "([None, 'proposals'], {0: 'it failed on another rank'})"
    assert told[1] == "([None, 'proposals'], {0: 'RuntimeError: one device is out of memory'})"
