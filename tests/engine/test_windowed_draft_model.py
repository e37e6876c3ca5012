"""A draft model that reads the first and the last pages of a request alone: answers stay those of plain decoding, and
what it reads is bounded, prompts and gaps included.

Real vLLM; a planted target drafts for itself as if it were another model, in pages of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.vllm_plugin.messages import DraftOrder

from tests.engine.engines import RequestArguments, bench, draft_model, sparse_self
from tests.engine.ordered import OrderedBench, ordered
from tests.engine.planted_models import Counting
from tests.engine.test_lossless_speculation import STORY
from tests.engine.test_request_kinds import COUNTING
from tests.engine.test_several_neural_drafters import MOST, all_members, by_turns, no_member
from tests.engine.test_sparse_self import ALL, CHAPTERS, LONGEST, PAGE, accepted, only

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
NARROW, WHOLE, SELF = range(3)
BUDGET = (1 + 3) * PAGE
"""Pages of `narrow`: one of sinks, and at most three for the last 64 tokens."""


@pytest.fixture(scope="module")
def engine(models: Counting) -> Iterator[OrderedBench]:
    pool = (
        draft_model(models.target, "narrow", window_tokens=64),
        draft_model(models.target, "whole", window_tokens=LONGEST),
        sparse_self(64),
    )
    with ordered(pool, extra=[f"--block-size={PAGE}"], target=models.target) as started:
        yield started


@pytest.fixture(scope="module")
def reference(engine: OrderedBench) -> list[list[int]]:
    return engine.run(ALL, no_member)


def test_answers_are_those_of_plain_decoding(engine: OrderedBench, reference: list[list[int]]) -> None:
    """It runs alone and by turns, together with the target's own window, while requests of 5
    and of 800 tokens come and go."""
    for give in (only(NARROW), only(WHOLE), all_members(), by_turns):
        assert engine.run(ALL, give, arrive_every=2) == reference
        assert all(not report.failures for _, report in engine.orders_and_reports)
        assert sum(engine.proposed(member) for member in range(len(engine.names))) > 0


def test_a_window_as_long_as_the_context_is_always_right(engine: OrderedBench, reference: list[list[int]]) -> None:
    """Bug: a page or a position that is off by one still gives the right answers, and poor proposals."""
    assert engine.run(ALL, only(WHOLE), arrive_every=2) == reference
    right, tried = accepted(engine, WHOLE, reference)
    assert right == tried > 0


def test_a_window_is_right_about_what_it_sees(engine: OrderedBench, reference: list[list[int]]) -> None:
    """The keys and values that it reads were made over a window, too, and still serve."""
    rates = []
    for member in (NARROW, WHOLE):
        assert engine.run(ALL, only(member)) == reference
        right, tried = accepted(engine, member, reference)
        rates.append(right / tried)
    assert 0.3 < rates[0] < rates[1] == 1.0


def test_pass_reads_at_most_the_window_and_its_own_tokens(
    engine: OrderedBench, reference: list[list[int]]
) -> None:  # fmt: skip
    """Promise: a pass costs what min(context, budget) tokens cost, in steps that read a prompt, too."""
    seen = list[tuple[int, int]]()
    tables = engine.member(NARROW)._short
    made = tables._built

    def noted(*arguments: Any, **keywords: Any) -> Any:
        metadata = made(*arguments, **keywords)
        layer_metadata = next(iter(metadata.values()))
        tokens = layer_metadata.query_start_loc[1:] - layer_metadata.query_start_loc[:-1]
        seen.extend(zip(layer_metadata.seq_lens.tolist(), tokens.tolist(), strict=True))
        return metadata

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_built", noted)
        assert engine.run(ALL, only(NARROW)) == reference
    assert max(read - tokens for read, tokens in seen) <= BUDGET
    assert max(tokens for _, tokens in seen) > BUDGET, "a prompt was read in one piece"
    assert min(tokens for _, tokens in seen) == 1


def test_answers_end_where_the_models_length_ends(engine: OrderedBench) -> None:
    prompts = [CHAPTERS + STORY, CHAPTERS + STORY[:650]]
    plain = engine.run(prompts, no_member, max_tokens=LONGEST)
    assert all(len(tokens) + count == LONGEST for tokens, count in zip(plain, engine.prompt_tokens, strict=True))
    for member in (NARROW, WHOLE):
        assert engine.run(prompts, only(member), max_tokens=LONGEST) == plain


def test_draft_model_with_a_window_fills_a_gap(engine: OrderedBench, reference: list[list[int]]) -> None:
    """A prompt that it did not read is read later, chunk after chunk; then it is right about everything."""
    chunk, last = 96, len(ALL) - 1
    engine.run([ALL[last]], no_member)
    prompt = engine.prompt_tokens[0]
    caught, ready = [0], [0]

    def late(_step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
        request = engine.scheduler.requests[requests[0]]
        known = request.num_computed_tokens
        if request.num_output_tokens < 2:
            return order
        if not ready[0]:
            end = min(known, caught[0] + chunk)
            order = order._replace(gaps=(KVGap(WHOLE, 0, caught[0], end),))
            caught[0] = end
            if end < known:
                return order
            ready[0] = request.num_output_tokens
        return only(WHOLE)(0, requests, order)

    assert engine.run([ALL[last]], late) == [reference[last]]
    assert caught[0] > prompt
    assert 0 < ready[0] < len(reference[last]) - MOST
    right, tried = 0, 0
    for (_, _, known), tokens in engine.scheduler.proposals.items():
        answer = reference[last][known - prompt :]
        tried += min(len(tokens), len(answer))
        right += sum(token == other for token, other in zip(tokens, answer, strict=False))
    assert right == tried > 0


def test_preempted_or_aborted_requests_do_not_affect_others(models: Counting) -> None:
    """The loop decides, with a tight window: prompts in chunks, memory for two of four, one of them aborted."""
    prompts: list[RequestArguments] = [(f"{number} {COUNTING * 4}", {"max_tokens": 60}) for number in range(4)]
    extra = [f"--block-size={PAGE}", "--max-num-batched-tokens=128"]
    with (
        bench([draft_model(models.target, window_tokens=32)], extra=extra, target=models.target) as served,
        pytest.MonkeyPatch.context() as patch,
    ):
        served.loop.pin(0)
        plain = served.run(prompts)
        served.fresh()
        served.loop.pin(3, "draft")
        preempted, preempt = list[str](), served.scheduler._preempt_request

        def noted(request: Any, *arguments: Any, **keywords: Any) -> None:
            preempted.append(request.request_id)
            preempt(request, *arguments, **keywords)

        patch.setattr(served.scheduler, "_preempt_request", noted)
        blocks = served.scheduler.kv_cache_manager.block_pool
        reserved = blocks.get_new_blocks(blocks.get_num_free_blocks() - 12)
        try:
            assert served.run(prompts) == plain
            assert preempted
            kept = served.run(prompts, abort_at={40: "1"})
        finally:
            blocks.free_blocks(reserved)
        assert [kept[place] for place in (0, 2, 3)] == [plain[place] for place in (0, 2, 3)]


def test_a_table_is_shortened_page_by_page() -> None:
    """Sinks and last pages of each request, and what its own tokens need beyond them."""
    from types import SimpleNamespace

    from outrider_runtime.drafters.window import Window
    from outrider_runtime.vllm_plugin.short_tables import ShortTables

    whole = torch.arange(40, dtype=torch.int32).reshape(2, 20)
    tables = SimpleNamespace(block_sizes=[4], block_tables=[SimpleNamespace(gpu=whole)])
    member = SimpleNamespace(attn_groups=[["layers"]], block_tables=tables, device=torch.device("cpu"), max_num_reqs=2)
    short = ShortTables(Window(sink_tokens=4, window_tokens=5), member)  # one page, and five tokens lie in two
    lengths, tokens = torch.tensor([42, 9]), torch.tensor([6, 1])
    table, seen = short._shortened(whole, lengths, tokens, 6)
    # The first of six tokens is the 37th: its window begins on page 8 of 0, 1, ..
    assert table[0].tolist() == [0, 8, 9, 10, 11]
    assert seen.tolist() == [42 - 7 * 4, 9]
    assert table[1, :3].tolist() == [20, 21, 22]


def test_block_table_of_special_layers_is_not_shortened() -> None:
    """Sliding windows, chunks, MLA, Mamba layers among others: left out with a sentence, target and draft alike."""
    from outrider_runtime.vllm_plugin.short_tables import check_plain
    from vllm.v1 import kv_cache_interface as vllm

    sizes: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    plain = vllm.FullAttentionSpec(**sizes)
    check_plain([plain, plain], 1, "the draft's", "remove it")
    others = {
        "SlidingWindowSpec with a window": vllm.SlidingWindowSpec(**sizes, sliding_window=128),
        "FullAttentionSpec with a window": vllm.FullAttentionSpec(**sizes, sliding_window=128),
        "ChunkedLocalAttentionSpec with a window": vllm.ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=128),
        "MLAAttentionSpec": vllm.MLAAttentionSpec(**sizes),
        "MambaSpec": vllm.MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)),
    }
    for kind, other in others.items():
        with pytest.raises(ValueError, match="attention is not plain") as caught:
            check_plain([plain, other], 1, "the target's", "remove it")
        assert f"the target's attention is not plain ({kind}): remove it" == str(caught.value)
    with pytest.raises(ValueError, match="--decode-context-parallel-size splits the target's KV"):
        check_plain([plain, plain], 2, "the target's", "remove it")
