"""Requests for which the engine computed NaN: each ends with an error, its pages are cleaned, and a sick pod ends."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider_runtime.vllm_plugin.broken_answers import BrokenAnswers, BrokenPodError, BrokenRow

PAGES = {"sick": ([0, 3, 4],), "well": ([0, 5],)}
SCHEDULED = {"sick": 8, "well": 1}


class FakeScheduler:
    """The parts of vLLM's scheduler that hold requests and pages; page 0 is vLLM's null page."""

    def __init__(self) -> None:
        plain: dict[str, Any] = {"lora_request": None, "prompt_embeds": None, "mm_features": []}
        self.requests: dict[str, Any] = {name: SimpleNamespace(**plain) for name in PAGES}
        media = SimpleNamespace(enable_mm_embeds=False)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=media))
        self.evicted: set[int] = set()
        self.grammar_compile_error_reqs: set[str] = set()
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=1) for number in range(6)]
        pool = SimpleNamespace(blocks=self.blocks, null_block=self.blocks[0])
        self.kv_cache_manager = SimpleNamespace(
            block_pool=pool, get_block_ids=PAGES.__getitem__, evict_blocks=self.evicted.update
        )


def output() -> Any:
    return SimpleNamespace(sampled_token_ids=[[0], [7]], req_id_to_index={"sick": 0, "well": 1})


def step(tokens: int = 8) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, new_block_ids_to_zero=None)


def test_broken_request_ends_with_an_error_and_no_token() -> None:
    """Bug: a request whose logits were NaN was answered with token 0, as a success."""
    scheduler, sampled = FakeScheduler(), output()
    answers = BrokenAnswers(scheduler)
    answers.end(["sick", "gone"], sampled, SCHEDULED | {"gone": 1})
    assert scheduler.grammar_compile_error_reqs == {"sick"}
    assert sampled.sampled_token_ids == [[], [7]]
    assert answers.count == 1


def test_pages_of_a_broken_request_are_zeroed_once_they_are_free() -> None:
    """Bug: NaN stayed in pages that later requests got. A page that another request has is zeroed when it is free."""
    scheduler = FakeScheduler()
    answers = BrokenAnswers(scheduler)
    answers.end(["sick"], output(), SCHEDULED)
    assert scheduler.evicted == {3, 4}
    assert answers.free_pages() == []
    scheduler.blocks[3].ref_cnt = 0
    idle = step(tokens=0)
    answers.zero(answers.free_pages(), idle)
    assert idle.new_block_ids_to_zero is None
    busy = step()
    answers.zero(answers.free_pages(), busy)
    assert busy.new_block_ids_to_zero == [3]
    scheduler.blocks[4].ref_cnt = 0
    assert answers.free_pages() == [4]


@pytest.mark.parametrize("broken_step", [1, 2])
def test_pages_given_up_before_the_report_are_zeroed(broken_step: int) -> None:
    """Bug: the client of a broken request left during the step, or it was preempted, and its NaN stayed in the pages.
    In asynchronous scheduling two steps run."""
    scheduler = FakeScheduler()
    answers = BrokenAnswers(scheduler)
    answers.note_abandoned(SimpleNamespace(request_id="well", num_in_flight_tokens=0))
    answers.note_abandoned(SimpleNamespace(request_id="sick", num_in_flight_tokens=9))
    del scheduler.requests["sick"]
    for number, tokens in enumerate((8, 1), 1):
        answers.end(["sick"] if number == broken_step else [], output(), {"sick": tokens, "well": 1})
    assert scheduler.evicted == {3, 4}
    assert answers.count == 0
    for block in scheduler.blocks:
        block.ref_cnt = 0
    assert answers.free_pages() == [3, 4]
    scheduler.evicted.clear()
    answers.end(["sick"], output(), SCHEDULED)
    assert not scheduler.evicted, "a later request of this name"


def test_page_that_another_request_gets_before_the_report_is_zeroed() -> None:
    """Bug: in asynchronous scheduling a request was preempted, or its client left, and another one got its pages before
    the broken step was reported. That one read NaN, and ended with a 500, too. It keeps its page after the report."""
    scheduler = FakeScheduler()
    answers = BrokenAnswers(scheduler)
    answers.note_abandoned(SimpleNamespace(request_id="sick", num_in_flight_tokens=8))
    del scheduler.requests["sick"]
    answers.note_allocated([3, 5])
    first, second = step(), step()
    for scheduled in (first, second):
        answers.zero(answers.free_pages(), scheduled)
    assert first.new_block_ids_to_zero == [3]
    assert second.new_block_ids_to_zero is None
    answers.end(["sick"], output(), SCHEDULED)
    assert scheduler.evicted == {4}
    for block in scheduler.blocks:
        block.ref_cnt = 0
    assert answers.free_pages() == [4]


def test_pages_that_a_request_gave_up_twice_are_all_zeroed() -> None:
    """Bug: it was preempted while a step of it ran, resumed, and aborted before that was reported. The pages that it
    had first were forgotten."""
    scheduler, pages = FakeScheduler(), dict(PAGES)
    scheduler.kv_cache_manager.get_block_ids = pages.__getitem__
    answers = BrokenAnswers(scheduler)
    answers.note_abandoned(SimpleNamespace(request_id="sick", num_in_flight_tokens=8))
    pages["sick"] = ([0, 2],)
    answers.note_abandoned(SimpleNamespace(request_id="sick", num_in_flight_tokens=9))
    del scheduler.requests["sick"]
    answers.end(["sick"], output(), SCHEDULED)
    assert scheduler.evicted == {2, 3, 4}


def test_pod_ends_when_no_request_is_finite() -> None:
    row = BrokenRow()
    row.observe(["a"], is_any_finite=False)
    row.observe(["a", "b"], is_any_finite=False)  # the same request again counts once
    with pytest.raises(BrokenPodError, match="last 3 requests had no finite hidden state"):
        row.observe(["c"], is_any_finite=False)


def test_pod_goes_on_while_other_requests_are_finite() -> None:
    row = BrokenRow()
    for name in "abcdef":
        row.observe([name], is_any_finite=False)
        row.observe([name], is_any_finite=True)


IMAGE, AUDIO = SimpleNamespace(modality="image"), SimpleNamespace(modality="audio")


@pytest.mark.parametrize(
    ("brought", "takes_embeddings", "restarts"),
    [
        ({}, True, True),
        ({"mm_features": [IMAGE]}, False, True),
        ({"mm_features": [IMAGE]}, True, False),
        ({"mm_features": [IMAGE, AUDIO]}, False, False),
        ({"prompt_embeds": object()}, False, False),
        ({"lora_request": SimpleNamespace(lora_name="")}, False, False),
    ],
)
def test_nan_of_a_client_or_adapter_ends_no_pod(
    brought: Any, takes_embeddings: bool, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: three requests with NaN embeddings, or two adapters that overflow, restarted a pod that was well otherwise.
    The next pod would get the same from them."""
    monkeypatch.setenv("OUTRIDER_RUN_DIR", str(tmp_path))
    scheduler = FakeScheduler()
    scheduler.vllm_config.model_config.multimodal_config.enable_mm_embeds = takes_embeddings
    scheduler.kv_cache_manager.get_block_ids = lambda _: ([3],)
    answers = BrokenAnswers(scheduler)
    request = SimpleNamespace(**vars(scheduler.requests["well"]) | brought)
    scheduler.requests = dict.fromkeys("abc", request)
    with pytest.raises(BrokenPodError) if restarts else nullcontext():
        for name in "abc":
            if request.lora_request:
                request.lora_request.lora_name = f"adapter-{name}"
            answers.end([name], SimpleNamespace(sampled_token_ids=[]), {name: 1})
