"""The target drafts for itself over the first and the last pages of a request: answers stay those of plain decoding,
and no KV changes that another request may read.

Real vLLM, a planted target, in this process, pages of 32 tokens; what each step drafts is ordered by the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_crds.draft_pool import SINK_TOKENS
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.vllm_plugin.messages import DraftOrder

from tests.engine.engines import OUTPUT_TOKENS, lookup, sparse_self, windowed
from tests.engine.ordered import Giver, OrderedBench, ordered
from tests.engine.planted_models import Counting
from tests.engine.test_lossless_speculation import PROMPTS, STORY
from tests.engine.test_several_neural_drafters import MOST, all_members, by_turns, no_member

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
PAGE = 32
LONGEST = 1024
NARROW, MIDDLE, WHOLE = range(3)
POOL = (sparse_self(1, "narrow", 0), sparse_self(64, "middle"), sparse_self(LONGEST - SINK_TOKENS, "whole"))
CHAPTERS = " ".join(f"Chapter {number}. {STORY}" for number in range(4))
"""A prompt of over 800 tokens: its prefill takes two steps, and its answer ends where the model's length ends."""
ALL = (*PROMPTS, CHAPTERS + "In the end", CHAPTERS + "Nobody")


@pytest.fixture(scope="module")
def engine(models: Counting) -> Iterator[OrderedBench]:
    with ordered(POOL, extra=[f"--block-size={PAGE}"], target=models.target) as started:
        yield started


@pytest.fixture(scope="module")
def reference(engine: OrderedBench) -> list[list[int]]:
    return engine.run(ALL, no_member)


@pytest.fixture(scope="module")
def by_window(engine: OrderedBench, reference: list[list[int]]) -> dict[int, tuple[int, int]]:
    """(accepted, tried) of each window, from runs in which it drafts alone while requests of 5 and of 800 tokens come
    and go."""
    counts = {}
    for member in (NARROW, MIDDLE, WHOLE):
        assert engine.run(ALL, only(member), arrive_every=2) == reference
        assert all(not report.failures for _, report in engine.orders_and_reports)
        counts[member] = accepted(engine, member, reference)
    return counts


def only(member: int, passes: int = MOST) -> Giver:
    def give(_step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[member] = passes
        order.chosen[:] = member
        return order._replace(draft_tokens=passes)

    return give


def first_only(_step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
    """One request of the batch drafts, whichever its window."""
    order.passes[MIDDLE] = MOST
    order.chosen[:] = [MIDDLE if place == 0 else NO_DRAFTER for place in range(len(requests))]
    return order._replace(draft_tokens=MOST)


def accepted(engine: OrderedBench, member: int, reference: list[list[int]]) -> tuple[int, int]:
    """Return (accepted, tried) of first proposals, and of all proposals."""
    right = tried = 0
    for (drafter, name, known), tokens in engine.scheduler.proposals.items():
        answer = reference[int(name)][known - engine.prompt_tokens[int(name)] :]
        if drafter == member:
            tried += min(len(tokens), len(answer))
            right += sum(token == other for token, other in zip(tokens, answer, strict=False))
    return right, tried


def test_answers_with_each_window_equal_plain(
    engine: OrderedBench, reference: list[list[int]], by_window: dict[int, tuple[int, int]]
) -> None:
    """It runs with every window, alone (`by_window`) and by turns."""
    assert [len(tokens) for tokens in reference] == [OUTPUT_TOKENS] * len(ALL)
    assert all(tried for _, tried in by_window.values())
    for give in (all_members(), by_turns, first_only):
        assert engine.run(ALL, give, arrive_every=2) == reference
        assert all(not report.failures for _, report in engine.orders_and_reports)


def test_window_of_context_length_is_always_right(by_window: dict[int, tuple[int, int]]) -> None:
    """Bug: a position, a page or a slot that is off by one still gives the right answers, and poor proposals."""
    right, tried = by_window[WHOLE]
    assert tried > len(ALL) * OUTPUT_TOKENS / 2
    assert right == tried


def test_longer_window_is_accepted_more_often(by_window: dict[int, tuple[int, int]]) -> None:
    rates = [right / tried for right, tried in by_window.values()]
    assert rates[NARROW] < rates[MIDDLE] < rates[WHOLE] == 1.0
    assert rates[MIDDLE] > 0.3


def test_passes_hold_only_requests_that_are_ordered(engine: OrderedBench, reference: list[list[int]]) -> None:
    """Its price is that of its requests' contexts, so the others must not be in its passes."""
    seen = list[int]()
    member, run = engine.member(MIDDLE), engine.member(MIDDLE)._run_model

    def counted(tokens: torch.Tensor, *arguments: Any) -> Any:
        seen.append(len(tokens))
        return run(tokens, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "_run_model", counted)
        assert engine.run(ALL, first_only) == reference
    assert {*seen} == {1}


def test_answers_end_at_the_model_length(engine: OrderedBench) -> None:
    """Proposals for places that no request can have are dropped, and nothing is written behind them."""
    prompts = [CHAPTERS + STORY[:500], CHAPTERS + STORY[:400]]
    plain = engine.run(prompts, no_member, max_tokens=LONGEST)
    assert all(len(tokens) + count == LONGEST for tokens, count in zip(plain, engine.prompt_tokens, strict=True))
    for member in (NARROW, WHOLE):
        assert engine.run(prompts, only(member), max_tokens=LONGEST) == plain


def test_shared_pages_are_never_written(engine: OrderedBench, reference: list[list[int]]) -> None:
    """Every page that the prefix cache knows holds the same at the next step, from the step on that has computed it."""
    watch = SharedPages(engine)

    def give(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
        watch.look()
        return all_members()(step, requests, order)

    assert engine.run(ALL, give, arrive_every=2) == reference
    assert watch.compared > 100
    assert engine.run(ALL, give, arrive_every=2, keep_prefixes=True) == reference


class SharedPages:
    def __init__(self, engine: OrderedBench) -> None:
        self._engine = engine
        self._before: dict[tuple[Any, int], torch.Tensor] = {}
        self._computed: set[tuple[Any, int]] = set()
        self.compared = 0

    def look(self) -> None:
        pool = self._engine.scheduler.kv_cache_manager.block_pool
        known = [(block.block_hash, block.block_id) for block in pool.blocks if block.block_hash is not None]
        contents = {page: content(self._engine, page[1]) for page in known}
        for page in self._computed & contents.keys():
            self.compared += 1
            # A page that was freed and computed again in between differs by rounding.
            assert torch.allclose(self._before[page], contents[page], atol=1e-3), (
                "a page of the prefix cache has changed"
            )
        self._computed, self._before = self._before.keys() & contents.keys(), contents


def content(engine: OrderedBench, block: int) -> torch.Tensor:
    """Keys and values of the first and the last layer in one page."""
    caches = (engine.runner.kv_caches[0], engine.runner.kv_caches[-1])
    dimension = caches[0].shape.index(engine.runner.kv_cache_config.num_blocks)
    return torch.stack([cache.select(dimension, block).clone() for cache in caches])


def test_slots_are_reserved_ahead_and_given_back(engine: OrderedBench, reference: list[list[int]]) -> None:
    manager = engine.scheduler.kv_cache_manager
    free = manager.block_pool.get_num_free_blocks()
    fewest = list[int]()

    def give(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
        for name in requests:
            pages = manager.coordinator.single_type_managers[0].req_to_blocks[name]
            request = engine.scheduler.requests[name]
            page_tokens = len(pages) * PAGE
            needed_tokens = request.num_computed_tokens + engine.scheduler.scheduled[name] + MOST
            fewest.append(page_tokens - min(needed_tokens, LONGEST))
        return only(NARROW)(step, requests, order)

    assert engine.scheduler.num_lookahead_tokens == MOST
    assert engine.run(ALL, give, arrive_every=2) == reference
    assert min(fewest) >= 0
    assert manager.block_pool.get_num_free_blocks() == free


def test_asynchronous_answers_equal_plain(models: Counting) -> None:
    """It works as on GPUs, and together with a lookup, which needs no slots."""
    with ordered([lookup(), *POOL], extra=[f"--block-size={PAGE}"], target=models.target, asynchronous=True) as engine:
        reference = engine.run(ALL, no_member)
        for give in (all_members(), by_turns):
            assert engine.run(ALL, give, arrive_every=2) == reference
            assert all(engine.proposed(member) for member in range(4))
            assert all(not report.failures for _, report in engine.orders_and_reports)


def test_sliding_window_target_is_served_without_it(models: Counting, tmp_path: Path) -> None:
    """Its layers have dropped what the shortened table would read."""
    with ordered([lookup(), sparse_self(64)], target=windowed(tmp_path, models.target)) as engine:
        assert "attention is not plain" in engine.failures["self"]
        assert set(engine.failures) == {"self"}
        assert [len(tokens) for tokens in engine.run(PROMPTS, no_member)] == [OUTPUT_TOKENS] * len(PROMPTS)
