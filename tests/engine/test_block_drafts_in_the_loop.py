"""Block drafters under the control loop, with vLLM's asynchronous scheduler.

Requests get what they ask for, and a block drafter proposes only where it has seen a request's whole context.

Real vLLM in this process, a small target, drafters with planted weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.spec import SpeculationMode
from outrider_runtime.loop import pod_state

from tests.engine import planted_models
from tests.engine.engines import (
    POOR_DRAFT,
    SMALL,
    Bench,
    RequestArguments,
    bench,
    block,
    draft_model,
    eagle,
    hot_config,
    interleaved,
    lookup,
)
from tests.engine.test_request_kinds import COUNTING, WITH_ADAPTERS, sampled_as, tokens, write_adapter

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
LIMITS = ("--max-model-len=512", "--max-num-batched-tokens=128", "--block-size=32")
LONG = "The old lighthouse keeper counted the waves: one, two, three, four, one, two. " * 12 + "Then he"
"""Longer than one step reads."""
OTHER = "A kettle sang on the stove while rain drew lines on every window of the long grey house. " * 6 + "Nobody"
IN_TURN = {537: 827, 582: 827, 827: 1296, 1296: 582}
"""Tokens of "one", " one", " two" and " three": what follows each in an answer under the regular expression."""
KINDS = ("greedy", "regular expression", "JSON schema", "repetition_penalty", "logit_bias", "top_k", "bad_words")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Bench]:
    pool = [
        lookup(),
        block(planted_models.dflash(folder / "dflash"), "flash"),
        eagle(planted_models.eagle_of_small(folder / "eagle")),
        block(
            planted_models.dspark(folder / "spark", IN_TURN | {token: token + 1 for token in range(200)}), "spark", 2
        ),
        draft_model(POOR_DRAFT),
    ]
    with bench(pool, asynchronous=True, target=SMALL, extra=[*LIMITS, *WITH_ADAPTERS]) as started:
        yield started


@pytest.fixture
def engine(running: Bench) -> Bench:
    running.fresh()
    return running


def by_turns(engine: Bench) -> Callable[[int], None]:
    """Each drafter for a few steps, at lengths that differ, and none for one."""
    spells = ((3, 3, "flash"), (2, 3, "pld"), (3, 2, "spark"), (2, 2, "eagle"), (1, 0, None), (2, 3, "draft"))
    turns = itertools.cycle([(length, drafter) for steps, length, drafter in spells for _ in range(steps)])
    return lambda _step: engine.loop.pin(*next(turns))


def plain(engine: Bench, requests: list[RequestArguments], **how: Any) -> list[list[list[int]]]:
    engine.loop.pin(0)
    made = tokens(engine.outputs(requests, **how))
    assert engine.verified() == 0
    engine.fresh()
    return made


def proposed_by(engine: Bench, drafter: str) -> int:
    """Tokens that the drafter proposed."""
    return sum(verified.proposed for verified in engine.outcomes if verified.drafter == drafter)


def test_state_names_each_block_drafter(engine: Bench) -> None:
    drafters = pod_state.drafters(engine.loop, engine.loop.state(), {})
    assert [drafter.kind for drafter in drafters] == ["", "DFlash", "", "DSpark", ""]


def test_requests_of_every_kind_and_adapter_share_a_batch(engine: Bench, folder: Path) -> None:
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("one", 1, str(write_adapter(folder / "one", seed=1, target=SMALL)))
    requests: list[RequestArguments] = [(COUNTING, sampled_as(kind)) for kind in KINDS] + [
        (LONG, {}),
        (LONG, {}),
        (OTHER, {}),
    ]
    adapters = {len(KINDS): adapter, 1: adapter}
    reference = plain(engine, requests, adapters=adapters, arrive_every=2)
    before_step = by_turns(engine)
    assert tokens(engine.outputs(requests, adapters=adapters, arrive_every=2, before_step=before_step)) == reference
    assert reference[len(KINDS)] != reference[len(KINDS) + 1], "the adapter changes answers"
    assert {verified.drafter for verified in engine.outcomes if verified.proposed} >= {"flash", "spark", "eagle"}


def test_answers_under_a_grammar_are_those_of_plain_decoding(engine: Bench) -> None:
    """Proposals of a block that the grammar rules out are dropped, others count; free requests share each step."""
    bound = ("regular expression", "JSON schema")
    requests: list[RequestArguments] = [(COUNTING, sampled_as(kind)) for kind in (*bound, "greedy")] + [(OTHER, {})]
    reference = plain(engine, requests)
    for drafter in ("flash", "spark"):
        engine.fresh()
        engine.loop.pin(2, drafter)
        assert tokens(engine.outputs(requests, arrive_every=1)) == reference
        own = [verified for verified in engine.outcomes if verified.drafter == drafter]
        proposed = {
            place
            for place in range(len(requests))
            for step in own
            if step.id.split("-")[0] == str(place) and step.proposed
        }
        assert proposed == {0, 1, 2, 3}, "each request was drafted for"
    assert sum(step.accepted for step in own if step.id.split("-")[0] == "0") > 0, "its planted successors are right"


def test_block_drafts_pause_and_go_on_without_a_restart(engine: Bench) -> None:
    """The next drafter in the order takes over. A request that began in the pause is a gap, those after it are not."""
    reference = plain(engine, [(COUNTING, {}), (OTHER, {})])
    order = ["flash", "spark", "draft", "eagle", "pld"]
    static = hot_config(SpeculationMode.STATIC).model_copy(update={"drafter_order": order})
    try:
        for paused, proposes in (([], "flash"), (["flash"], "spark"), (["flash", "spark"], "draft"), ([], "flash")):
            engine.fresh()
            engine.loop.configure(static.model_copy(update={"paused_drafters": paused}))
            assert tokens(engine.outputs([(COUNTING, {}), (OTHER, {})])) == reference
            assert {step.drafter for step in engine.outcomes if step.proposed} == {proposes}
    finally:
        engine.loop.configure(engine.plan.hot)


def test_length_ends_at_the_block(engine: Bench) -> None:
    """Bug: `maxTokens` 2 was ordered 3 tokens, and places were scheduled for tokens that never came."""
    engine.loop.pin(3, "spark")
    engine.generate([COUNTING])
    spark = [verified for verified in engine.outcomes if verified.drafter == "spark" and verified.proposed]
    assert spark
    assert {verified.planned_tokens for verified in spark} == {2}


def test_prefix_that_a_block_drafter_saw_is_not_fed_again(engine: Bench) -> None:
    engine.loop.pin(2, "flash")
    first = engine.generate([LONG])
    engine.steps.clear()
    assert engine.generate([LONG]) == first
    assert proposed_by(engine, "flash") > 0


def test_prefix_that_a_block_drafter_missed_stays_a_gap(engine: Bench) -> None:
    """Hidden states are gone after their step: over such a prefix it would propose junk for good."""
    reference = plain(engine, [(LONG, {})])
    engine.loop.pin(0)
    engine.generate([LONG])
    engine.loop.pin(2, "flash")
    engine.steps.clear()
    assert engine.generate([LONG]) == [choice[0] for choice in reference]
    assert proposed_by(engine, "flash") == 0
    engine.generate([OTHER])
    assert proposed_by(engine, "flash") > 0


def test_preempted_requests_are_drafted_for_again(engine: Bench) -> None:
    requests: list[RequestArguments] = [(LONG, {}), (COUNTING, {}), (OTHER, {})]
    reference = plain(engine, requests)
    last = 24

    def before_step(step: int) -> None:
        engine.loop.pin(2, "flash")
        if step in (12, last):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.steps.clear()

    assert tokens(engine.outputs(requests, before_step=before_step)) == reference
    assert proposed_by(engine, "flash") > 0


def test_prefix_hit_with_several_kv_groups_is_no_gap(folder: Path) -> None:
    """Bug: on a target whose layers forget, as on hybrid ones, every prefix hit was a gap, which a block drafter never
    closes, and a draft model had to read again."""
    pool = [lookup(), block(planted_models.dflash(folder / "beside"), "flash"), draft_model(POOR_DRAFT)]
    with bench(pool, asynchronous=True, target=interleaved(folder), extra=LIMITS) as engine:
        assert len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1
        for drafter in ("flash", "draft"):
            engine.fresh()
            engine.loop.pin(2, drafter)
            first = engine.generate([LONG])
            engine.steps.clear()
            fed = engine.loop.caught_up_tokens
            assert engine.generate([LONG]) == first
            assert proposed_by(engine, drafter) > 0
            assert engine.loop.caught_up_tokens == fed
