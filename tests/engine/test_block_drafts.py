"""Block drafters live in one engine with lookups, heads and draft models: greedy answers stay those of plain
decoding while draft lengths change from step to step, and each member proposes what it proposes alone.

Real vLLM in this process, small targets, drafters with planted weights. What each step drafts is ordered by the test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from outrider_crds.draft_pool import DrafterSpec
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.loop.confidences import QUANTA_PER_UNIT, UNKNOWN, Calibrator
from outrider_runtime.vllm_plugin.messages import IDLE, DraftOrder, VerifyOrder, numbers

from tests.engine import planted_models
from tests.engine.engines import RequestArguments, block, draft_model, eagle, interleaved, lookup
from tests.engine.ordered import Giver, OrderedBench, ordered
from tests.engine.planted_models import COUNTING_SIZES, Counting, counting_llama

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
TRAINED_CONFIDENCE = -8.0
"""Log-odds that no planted draft's own are near."""
MOST = 3
"""Tokens, fewer than a block of the checkpoints holds."""
IN_CHUNKS = ("--max-num-batched-tokens=256",)
CHUNKED = "The old lighthouse keeper counted the waves: one, two, three, four, one, two. " * 15 + "Then he"
"""A prompt that an engine with IN_CHUNKS reads in two steps."""
LAYERS = 6
"""Layers of the planted target, whose first, third and fifth ones block drafters read."""
PROMPTS = (
    "The capital of France is",
    "one two three four five six one two three four five six one two three",
    "def fib(n):\n    if n < 2:\n        return n\n    return",
    CHUNKED,
)
BLOCKS = ("dflash", "spark", "dflash2", "second")
COUNTING = "one two three four five six one two three four five six one two three"
REGULAR_EXPRESSION = "(one two three ){4}"


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
    order.chosen[[member == NO_DRAFTER or order.passes[member] <= 0 for member in order.chosen]] = NO_DRAFTER
    return order._replace(draft_tokens=max(0, int(order.passes.max())))


def fed_then_short(member: int) -> Giver:
    def give(step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[member] = 0 if step % 8 < 4 else 1 + step % MOST
        order.chosen[:] = member if step % 8 >= 4 else NO_DRAFTER
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
    rights = [engine.right(member, reference) for member in range(len(engine.names))]
    right, tried = np.sum(rights, axis=0).tolist()
    assert 0 < right < tried or engine.runner._asynchronous, "some tokens are accepted, some rejected"
    assert engine.run(PROMPTS, by_turns, arrive_every=2) == reference
    assert_forwards(engine)
    for member, name in enumerate(engine.names):
        if name == "pld":
            continue
        assert engine.run(PROMPTS, fed_then_short(member)) == reference
        assert all(not report.failures for _, report in engine.orders_and_reports)
        assert engine.run(PROMPTS, alone(member)) == reference
        own = engine.scheduler.proposals
        common = [at for at in own.keys() & together.keys() if at[0] == member]
        assert common or engine.runner._asynchronous
        assert all(own[at] == together[at] for at in common), name


def assert_forwards(engine: OrderedBench) -> None:
    """A block drafter makes one pass for any length, and none where it is fed alone."""
    assert all(not report.failures for _, report in engine.orders_and_reports)
    for member, name in enumerate(engine.names):
        lengths = [int(order.passes[member]) for order, _ in engine.orders_and_reports]
        if name in BLOCKS:
            assert engine.forwards[member] == sum(length > 0 for length in lengths)
        elif name != "pld":
            assert engine.forwards[member] == sum(max(1, length) for length in lengths if length != IDLE)
        reports = [report.seconds[member] for _, report in engine.orders_and_reports]
        assert (np.isfinite(reports) == (np.array(lengths) != IDLE)).all()


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return counting_llama(folder / "target", LAYERS)


@pytest.fixture(scope="module")
def five(folder: Path, models: Counting) -> Sequence[DrafterSpec]:
    successors = {token: token + 1 for token in range(100, 300)}
    return [
        lookup(),
        eagle(models.head),
        block(planted_models.dspark(folder / "spark", successors, **COUNTING_SIZES), "spark"),
        block(planted_models.dflash(folder / "dflash", **COUNTING_SIZES), "dflash"),
        draft_model(models.draft),
    ]


@pytest.fixture(scope="module")
def engine_of_five(five: Sequence[DrafterSpec], target: Path) -> Iterator[OrderedBench]:
    with ordered(five, target=target, extra=IN_CHUNKS) as engine:
        yield engine


def test_pool_of_five_is_lossless(engine_of_five: OrderedBench) -> None:
    assert_members_serve(engine_of_five)
    blocks = [engine_of_five.member(number) for number, name in enumerate(engine_of_five.names) if name in BLOCKS]
    speculative = [member.vllm_config.speculative_config for member in blocks]
    assert [config.num_speculative_tokens_per_batch_size for config in speculative] == [None, None], "a graph a length"


def test_grammars_hold_in_a_batch_with_free_requests(engine_of_five: OrderedBench) -> None:
    assert_grammars_hold(engine_of_five)


def test_preempted_requests_answer_alike(engine_of_five: OrderedBench) -> None:
    assert_preempted_requests_answer_alike(engine_of_five)


def assert_preempted_requests_answer_alike(engine: OrderedBench) -> None:
    reference = engine.run(PROMPTS, idle)
    preempted = list[int]()

    def before_step(step: int) -> None:
        if step in (4, 9, 14):
            preempted.append(len(engine.scheduler.running))
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    assert engine.run(PROMPTS, by_turns, before_step=before_step) == reference
    assert sum(preempted) > len(PROMPTS)
    assert_forwards(engine)


def assert_grammars_hold(engine: OrderedBench) -> None:
    """Answers under a grammar, next to free ones, are plain decoding's whatever is proposed."""
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"name": {"enum": ["one", "two"]}}, "required": ["name"]}
    bound = (
        StructuredOutputsParams(regex=REGULAR_EXPRESSION),
        StructuredOutputsParams(json=schema, disable_any_whitespace=True),
    )
    requests: list[str | RequestArguments] = [
        *((COUNTING, {"structured_outputs": grammar, "ignore_eos": False}) for grammar in bound), (COUNTING, {}),
        CHUNKED,
    ]  # fmt: skip
    reference = engine.run(requests, idle)
    text = engine.llm.get_tokenizer().decode(reference[0], skip_special_tokens=True)
    assert len(text) > 10
    assert " ".join(["one two three"] * 4).startswith(text.strip()), "or it ends by its length"
    for give in (everything, by_turns):
        assert engine.run(requests, give, arrive_every=1) == reference
        assert_forwards(engine)
        assert any(report.proposed[report.proposer >= 0].any() for _, report in engine.orders_and_reports)


def strays(engine: OrderedBench, give: Giver) -> list[str]:
    """Writes of block drafters outside the pages of their requests, in sentences."""
    from outrider_runtime.vllm_plugin.block_draft import BlockMember

    outside = list[str]()
    tables, scheduler = engine.runner.block_tables, engine.scheduler

    def check(member: Any, input_batch: Any) -> None:
        for group in member.draft_kv_cache_group_ids:
            owned = [{*scheduler.kv_cache_manager.get_block_ids(name)[group]} for name in input_batch.req_ids]
            width = member.num_query_per_req
            slots = tables.slot_mappings[group][: len(owned) * width].view(-1, width)
            for pages, row in zip(owned, (slots // tables.block_sizes[group]).tolist(), strict=True):
                outside.extend(f"page {page} of {sorted(pages)}" for page in row if page >= 0 and page not in pages)

    with pytest.MonkeyPatch.context() as patch:
        for member in engine.runner.speculator._members.values():
            if not isinstance(member, BlockMember):
                continue

            def propose(batch: Any, *arguments: Any, own: Any = member, call: Any = member.propose, **more: Any) -> Any:
                made = call(batch, *arguments, **more)
                if more.get("num_speculative_tokens"):
                    check(own, batch)
                return made

            patch.setattr(member, "propose", propose)
        lengths = range(40, 60)
        engine.run([CHUNKED, *(CHUNKED[:length] for length in lengths)], give, arrive_every=1)
    return outside


def test_no_block_is_written_beyond_the_pages_of_its_request(engine_of_five: OrderedBench) -> None:
    """Bug: vLLM reserved pages for the primary drafter (DSpark, a token less), and DFlash wrote into pages that an
    earlier request of its row had left in the block table."""
    assert engine_of_five.scheduler.num_lookahead_tokens == MOST + 1
    assert strays(engine_of_five, everything) == []


def test_fed_block_drafter_prepares_no_pass(engine_of_five: OrderedBench) -> None:
    """Bug: a step that only fed it cleared pages behind each request and built the attention's metadata of a pass."""
    from outrider_runtime.vllm_plugin import block_draft, block_edges

    number = engine_of_five.names.index("dflash")
    calls = {"clear": 0, "metadata": 0}
    member = engine_of_five.member(number)

    def counted(name: str, call: Any) -> Any:
        def counting(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return call(*arguments, **keywords)

        return counting

    def fed_alone(_step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[number] = 0
        return order

    clear, metadata = block_edges.clear_past_last_block, member._build_attn_metadata
    with (
        mock.patch.object(block_draft, "clear_past_last_block", counted("clear", clear)),
        mock.patch.object(member, "_build_attn_metadata", counted("metadata", metadata)),
    ):
        engine_of_five.run(PROMPTS[:1], fed_alone)
        assert calls == {"clear": 0, "metadata": 0}
        engine_of_five.run(PROMPTS[:1], alone(number))
        assert min(calls.values()) > 0


def test_pool_of_five_is_lossless_with_asynchronous_scheduling(five: Sequence[DrafterSpec], target: Path) -> None:
    with ordered(five, target=target, asynchronous=True, extra=IN_CHUNKS) as engine:
        assert_members_serve(engine)
        assert_preempted_requests_answer_alike(engine)


def test_blocks_and_a_draft_model_on_a_sliding_window_target(
    folder: Path, five: Sequence[DrafterSpec], target: Path
) -> None:  # fmt: skip
    """Half of the layers see 64 tokens, the drafts all of them: several KV groups, each with pages of its own."""
    pool = [drafter for drafter in five if drafter.name != "eagle"]
    with ordered(pool, target=interleaved(folder, target), extra=IN_CHUNKS) as engine:
        assert len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1
        assert_members_serve(engine)
        assert strays(engine, everything) == []
        assert_preempted_requests_answer_alike(engine)


def ranked(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
    """Each request has a member of its own, and the device verifies 0 to 4 of the tokens that they propose."""
    alike = np.ones(len(requests), np.float32)
    verify = VerifyOrder(step % 5, numbers([0] * len(requests)), alike)
    calibration = Calibrator(len(order.passes), MOST).current
    return everything(step, requests, order)._replace(verify=verify, calibration=calibration)


def test_device_ranks_block_drafters_by_confidence(folder: Path, target: Path) -> None:
    """vLLM's DFlash2 gives its confidence to vLLM's own estimator alone: its tokens would all have ranked alike. And a
    DSpark checkpoint's trained head was never read: the planted one is as sure of every token, log-odds are not."""
    successors, sizes = {token: token + 1 for token in range(300)}, COUNTING_SIZES
    drafters = [
        block(planted_models.dflash(folder / "ranked-dflash", **sizes), "dflash"),
        block(planted_models.dspark(folder / "ranked", successors, confidence=TRAINED_CONFIDENCE, **sizes), "spark"),
        block(planted_models.dflash2(folder / "ranked-dflash2", **sizes), "dflash2"),
    ]
    with ordered(drafters, target=target, asynchronous=True, extra=IN_CHUNKS) as engine:
        assert not engine.failures
        reference = engine.run(PROMPTS, idle)
        assert engine.run(PROMPTS, ranked, arrive_every=2) == reference
        said = {name: reported_confidences(engine, member) for member, name in enumerate(engine.names)}
        assert len(said["dflash"]) > 10
        assert len(said["dflash2"]) > 10
        trained = np.array([*said["spark"]]) / QUANTA_PER_UNIT
        assert np.abs(trained - TRAINED_CONFIDENCE).max() < 2.0


def reported_confidences(engine: OrderedBench, member: int) -> set[int]:
    """Values of all tokens that the member proposed."""
    values = set[int]()
    for _, report in engine.orders_and_reports:
        assert not report.failures
        assert report.confidence is not None
        for row in (report.proposer == member).nonzero()[0]:
            values.update(report.confidence[row, : report.proposed[row]].tolist())
    assert UNKNOWN not in values
    return values
