"""Block drafters and MTP live in one engine with lookups, heads and draft models: greedy answers stay those of plain
decoding while draft lengths change from step to step, and each member proposes what it proposes alone.

Real vLLM in this process, small targets, drafters with planted weights. What each step drafts is ordered by the test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_crds.spec import Drafter
from outrider_runtime.control.data.batch import NOBODY
from outrider_runtime.loop.confidences import UNKNOWN, Calibrator
from outrider_runtime.vllm_plugin.messages import IDLE, DraftOrder, VerifyOrder, numbers

from tests.engine import planted_models
from tests.engine.engines import POOR_DRAFT, SMALL, block, draft_model, eagle, lookup
from tests.engine.ordered import Giver, OrderedBench, ordered

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
MOST = 3
"""Tokens, fewer than a block of the checkpoints holds."""
CHUNKED = "The old lighthouse keeper counted the waves: one, two, three, four, one, two. " * 36 + "Then he"
"""A prompt that is read in two steps."""
PROMPTS = (
    "The capital of France is",
    "one two three four five six one two three four five six one two three",
    "def fib(n):\n    if n < 2:\n        return n\n    return",
    CHUNKED,
)
BLOCKS = ("dflash", "spark", "dflash2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return tmp_path_factory.mktemp("planted")


def idle(_step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
    return order


def everything(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
    order.passes[:] = MOST
    order.chosen[:] = [(step + place) % len(order.passes) for place in range(len(requests))]
    return order._replace(draft_tokens=MOST)


def by_turns(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
    """Lengths by turns: idle, fed alone, 1, 2, the most; another member for each request at every step."""
    members = len(order.passes)
    order.chosen[:] = [(step + place) % (members + 1) - 1 for place in range(len(requests))]
    order.passes[:] = [(IDLE, 0, 1, 2, MOST)[(step + 2 * member) % 5] for member in range(members)]
    order.chosen[[member == NOBODY or order.passes[member] <= 0 for member in order.chosen]] = NOBODY
    return order._replace(draft_tokens=max(0, int(order.passes.max())))


def fed_then_short(member: int) -> Giver:
    def give(step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[member] = 0 if step % 8 < 4 else 1 + step % MOST
        order.chosen[:] = member if step % 8 >= 4 else NOBODY
        return order._replace(draft_tokens=int(order.passes[member]))

    return give


def alone(member: int) -> Giver:
    def give(_step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[member], order.chosen[:] = MOST, member
        return order._replace(draft_tokens=MOST)

    return give


def assert_members_serve(engine: OrderedBench) -> None:
    """Greedy answers are plain decoding's in every order of drafts; a member's proposals do not depend on others."""
    assert not engine.failures
    reference = engine.run(PROMPTS, idle)
    assert not engine.forwards
    assert engine.run(PROMPTS, everything) == reference
    together = dict(engine.scheduler.proposals)
    assert engine.run(PROMPTS, by_turns, arrive_every=2) == reference
    assert_forwards(engine)
    for member, name in enumerate(engine.names):
        if name == "pld":
            continue
        assert engine.run(PROMPTS, fed_then_short(member)) == reference
        assert all(not report.failures for _, report in engine.told)
        assert engine.run(PROMPTS, alone(member)) == reference
        own = engine.scheduler.proposals
        common = [at for at in own.keys() & together.keys() if at[0] == member]
        assert common or engine.runner._asynchronous
        assert all(own[at] == together[at] for at in common), name


def assert_forwards(engine: OrderedBench) -> None:
    """A block drafter makes one pass for any length, and none where it is fed alone."""
    assert all(not report.failures for _, report in engine.told)
    for member, name in enumerate(engine.names):
        lengths = [int(order.passes[member]) for order, _ in engine.told]
        if name in BLOCKS:
            assert engine.forwards[member] == sum(length > 0 for length in lengths)
        elif name != "pld":
            assert engine.forwards[member] == sum(max(1, length) for length in lengths if length != IDLE)
        reports = [report.seconds[member] for _, report in engine.told]
        assert (np.isfinite(reports) == (np.array(lengths) != IDLE)).all()


def pool_of_five(folder: Path) -> list[Drafter]:
    successors = {token: token + 1 for token in range(100, 300)}
    return [
        lookup(),
        eagle(planted_models.eagle_of_small(folder / "eagle")),
        block(planted_models.dspark(folder / "spark", successors), "spark"),
        block(planted_models.dflash(folder / "dflash"), "dflash"),
        draft_model(POOR_DRAFT),
    ]


@pytest.fixture(scope="module")
def five(folder: Path) -> Sequence[Drafter]:
    return pool_of_five(folder)


@pytest.fixture(scope="module")
def engine_of_five(five: Sequence[Drafter]) -> Iterator[OrderedBench]:
    with ordered(five, target=SMALL) as engine:
        yield engine


def test_pool_of_five_is_lossless(engine_of_five: OrderedBench) -> None:
    assert_members_serve(engine_of_five)
    blocks = [engine_of_five.member(number) for number, name in enumerate(engine_of_five.names) if name in BLOCKS]
    speculative = [member.vllm_config.speculative_config for member in blocks]
    assert [config.num_speculative_tokens_per_batch_size for config in speculative] == [None, None], "a graph a length"


def ranked(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
    """Each request has a member of its own, and the device verifies 0 to 4 of the tokens that they propose."""
    alike = np.ones(len(requests), np.float32)
    verify = VerifyOrder(step % 5, numbers([0] * len(requests)), alike)
    calibration = Calibrator(len(order.passes), MOST).current
    return everything(step, requests, order)._replace(verify=verify, calibration=calibration)


def test_device_ranks_block_drafters_by_confidence(folder: Path) -> None:
    """vLLM's DFlash2 gives its confidence to vLLM's own estimator alone: its tokens would all have ranked alike."""
    drafters = [
        block(planted_models.dflash(folder / "ranked-dflash"), "dflash"),
        block(planted_models.dspark(folder / "ranked-spark", {token: token + 1 for token in range(300)}), "spark"),
        block(planted_models.dflash2(folder / "ranked-dflash2"), "dflash2"),
    ]
    with ordered(drafters, target=SMALL, asynchronous=True) as engine:
        assert not engine.failures
        reference = engine.run(PROMPTS, idle)
        assert engine.run(PROMPTS, ranked, arrive_every=2) == reference
        for member, name in enumerate(engine.names):
            assert len(reported_confidences(engine, member)) > 10, name


def reported_confidences(engine: OrderedBench, member: int) -> set[int]:
    """Values of all tokens that the member proposed."""
    values = set[int]()
    for _, report in engine.told:
        assert not report.failures
        assert report.confidence is not None
        for row in (report.proposer == member).nonzero()[0]:
            values.update(report.confidence[row, : report.proposed[row]].tolist())
    assert UNKNOWN not in values
    return values
