"""Tensor parallelism: what a drafter does on one rank it does on all. Two processes, gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outrider_cpu
import pytest
from outrider_runtime.paths import RUN_DIR_VARIABLE
from outrider_runtime.step_clock import HostClock
from outrider_runtime.vllm_plugin.agreement import (
    Agreement,
    DifferentPoolsError,
    RanksDisagreeError,
    among,
    check_same_pool,
)
from outrider_runtime.vllm_plugin.drafting_step import DraftingStep
from outrider_runtime.vllm_plugin.messages import DraftOrder, numbers
from torch import distributed
from torch.multiprocessing.spawn import spawn

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
Case = Callable[[int, Agreement], Any]


def _rank(rank: int, folder: str) -> None:
    os.environ.update({RUN_DIR_VARIABLE: folder, **outrider_cpu.ENVIRONMENT})
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    world = distributed.group.WORLD
    assert world is not None
    made = {case.__name__: case(rank, among(world)) for case in CASES}
    Path(folder, f"rank{rank}").write_text(json.dumps(made))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def reports_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], list[Any]]:
    """What each of two ranks makes of a case."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(_rank, args=(str(folder),), nprocs=2)
    ranks = [json.loads((folder / f"rank{rank}").read_text()) for rank in range(2)]
    return lambda case: [rank[case.__name__] for rank in ranks]


def out_of_memory() -> str:
    raise RuntimeError("out of memory")


def a_step(agree: Agreement, *works: Callable[[], object]) -> Any:
    """Return what these members made, and the reported failures."""
    none = numbers([-1])
    step = DraftingStep(DraftOrder(1, numbers([1] * len(works)), none, none), ["a"], HostClock(), agree)
    step.begin(["a"])
    try:
        made = [step.run(member, work) for member, work in enumerate(works)]
    except RanksDisagreeError as error:
        return str(error)
    step.end()
    return [made, step.report().failures]


def fails_on_both(_rank: int, agree: Agreement) -> Any:
    return a_step(agree, out_of_memory, lambda: "proposals")


def fails_on_the_second(rank: int, agree: Agreement) -> Any:
    return a_step(agree, out_of_memory if rank == 1 else lambda: "proposals", lambda: "proposals")


def made_on_one(rank: int, agree: Agreement) -> Any:
    return starts(rank, agree, "made")


def captured_on_one(rank: int, agree: Agreement) -> Any:
    return starts(rank, agree, "capture")


def starts(rank: int, agree: Agreement, fails: str) -> Any:
    """A pool of two, the first of which fails on rank 1: what is left of it."""
    from tests.engine.test_pool_of_drafters import Member, pool

    class Broken(Member):
        def __getattribute__(self, name: str) -> Any:
            return out_of_memory if name == fails and rank == 1 else super().__getattribute__(name)

    def make() -> Any:
        return out_of_memory() if fails == "made" and rank == 1 else Broken(10)

    noted: list[str] = []
    try:
        speculator = pool(make, lambda: Member(20), note_failure=lambda name, _: noted.append(name), agree=agree)
        speculator.capture()
    except RuntimeError as error:
        return str(error), noted
    return sorted(speculator._members), noted


def ranked(rank: int, agree: Agreement) -> Any:
    """Placeholders of 40 steps that a rank verifies, its requests in slots of its own."""
    from tests.engine.test_device_ranking import ranked_steps

    return [starts.tolist() for starts in ranked_steps(40, slots_from=5 * rank)], agree(False).name


def pool_of_a_node(rank: int, _agree: Agreement) -> str:
    """The second node lacks a draft."""
    world = distributed.group.WORLD
    assert world is not None
    check_same_pool(["lookup"], world)
    try:
        check_same_pool(["lookup"] if rank else ["lookup", "eagle"], world)
    except DifferentPoolsError as error:
        return str(error)
    return ""


CASES: tuple[Case, ...] = (
    fails_on_both, fails_on_the_second, made_on_one, captured_on_one, ranked, pool_of_a_node
)  # fmt: skip


def test_a_drafter_that_fails_on_all_ranks_costs_its_proposals(reports_of_ranks: Any) -> None:
    """The rest of the pool proposes, and the engine goes on."""
    assert reports_of_ranks(fails_on_both) == [[[None, "proposals"], {"0": "RuntimeError: out of memory"}]] * 2


def test_a_drafter_that_fails_on_one_rank_fails_on_all_at_once(reports_of_ranks: Any) -> None:
    """Bug: the exception was swallowed. The others waited in a collective, or took the target's next sum for the rest
    of the draft's: they would have verified other tokens."""
    first, second = reports_of_ranks(fails_on_the_second)
    assert "number 0 of the pool failed on another rank alone" in first
    assert "failed on this rank alone (RuntimeError: out of memory)" in second


def test_a_drafter_that_one_rank_cannot_load_is_left_out_on_all(reports_of_ranks: Any) -> None:
    """Ranks load apart from each other, so that they go on together."""
    assert reports_of_ranks(made_on_one) == [[[1], ["member 0"]]] * 2


def test_ranks_that_differ_at_start_restart_without_the_drafter(
    reports_of_ranks: Any,
) -> None:
    """Graphs hold collectives; the note is what the next start leaves it out for."""
    ended = "drafter 'member 0' cannot be started on some ranks alone: the engine starts again without it"
    assert reports_of_ranks(captured_on_one) == [[ended, ["member 0"]]] * 2


def test_two_ranks_verify_the_same_tokens(request: pytest.FixtureRequest) -> None:
    """Or their passes would have other shapes, and a collective would never end. Scores of many requests are equal."""
    first, second = request.getfixturevalue("reports_of_ranks")(ranked)
    assert first == second
    steps, _ = first
    assert len({tuple(lengths) for lengths in steps}) > 30, "the steps differ"


def test_ranks_with_different_pools_end_before_they_load(reports_of_ranks: Any) -> None:
    """One node lacks a draft: its ranks would leave the others waiting in a collective for ever."""
    sentence = (
        "the ranks host different drafters (rank 0: lookup, eagle; rank 1: lookup); each node needs every draft model"
    )
    assert reports_of_ranks(pool_of_a_node) == [sentence] * 2
