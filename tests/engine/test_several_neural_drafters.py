"""Several heads and draft models live in one engine: greedy answers stay those of plain decoding, token for token, and
each request gets the proposals of the ordered member.

Real vLLM in this process, planted models, and SmolLM2 for what a head was trained for; what each step drafts is ordered
by the test.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_crds.draft_pool import DrafterSpec
from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.vllm_plugin.messages import IDLE, DraftOrder
from safetensors.torch import load_file, save_file

from tests.engine.engines import (
    EAGLE_HEAD,
    OUTPUT_TOKENS,
    POOR_DRAFT,
    draft_model,
    eagle,
    head_reading,
    lookup,
)
from tests.engine.ordered import Giver, OrderedBench, ordered
from tests.engine.planted_models import Counting, counting_head
from tests.engine.test_lossless_speculation import SHORT, STORY

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
MOST = 3
READ, OTHER_LAYERS, BROKEN_LAYERS = [2, 15, 27], [1, 11, 21], [3, 12, 20]
"""Layers of SmolLM2: those that the example's head was trained for and reads, as it names none, and others."""
TWO_HEADS = {"eagle": (1, 2, 3), "other": (0, 2, 4)}
"""Layers of the planted target that each head reads."""


@pytest.fixture(scope="module")
def heads(folder: Path) -> list[DrafterSpec]:
    return [eagle(counting_head(folder / name, layers), name) for name, layers in TWO_HEADS.items()]


@pytest.fixture(scope="module", params=["two heads", "head, draft model and lookup", "two draft models"])
def pool(request: pytest.FixtureRequest, models: Counting, heads: list[DrafterSpec]) -> tuple[DrafterSpec, ...]:
    return {
        "two heads": tuple(heads),
        "head, draft model and lookup": (draft_model(models.draft), lookup(), heads[0]),
        "two draft models": (draft_model(models.draft), draft_model(models.draft, "twin")),
    }[request.param]


@pytest.fixture(scope="module")
def engine(pool: tuple[DrafterSpec, ...], models: Counting) -> Iterator[OrderedBench]:
    with ordered(pool, target=models.target) as started:
        yield started


@pytest.fixture(scope="module")
def reference(engine: OrderedBench) -> list[list[int]]:
    return engine.run(SHORT, no_member)


def no_member(_step: int, _requests: list[str], idle: DraftOrder) -> DraftOrder:
    return idle


def all_members(passes: int = MOST) -> Giver:
    """All members run in each step, and requests take turns with them."""

    def give(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[:] = passes
        order.chosen[:] = [(step + place) % len(order.passes) for place in range(len(requests))]
        return order._replace(draft_tokens=passes)

    return give


def by_turns(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
    """Another member for each request at every step, none included, with lengths of their own.

    A member that is not chosen idles.
    For ten steps of twenty the last member is paused."""
    members = len(order.passes)
    order.chosen[:] = [(step + place) % (members + 1) - 1 for place in range(len(requests))]
    if step // 10 % 2:
        order.chosen[order.chosen == members - 1] = NO_DRAFTER
    for member in set(order.chosen.tolist()) - {NO_DRAFTER}:
        order.passes[member] = 1 + (step + member) % MOST
    return order._replace(draft_tokens=max(0, int(order.passes.max())))


def fed_then_short(step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
    """Each member in turn: four steps with its first pass alone, then four with fewer tokens than the most."""
    member = step // 8 % len(order.passes)
    if step % 8 < 4:
        order.passes[member] = 0
        return order
    order.passes[member] = MOST - 1 - step % 2
    order.chosen[:] = member
    return order._replace(draft_tokens=MOST - 1 - step % 2)


def test_member_after_feed_alone_proposes_fewer_tokens(engine: OrderedBench, reference: list[list[int]]) -> None:
    """Bug: the padding of K = 0, and that behind a smaller K, was taken for nonsense, and the drafter suspended."""
    assert engine.run(SHORT, fed_then_short) == reference
    assert all(not report.failures for _, report in engine.orders_and_reports)
    fed = [report for order, report in engine.orders_and_reports if not order.draft_tokens and order.passes.max() == 0]
    assert fed
    assert all(not report.proposed.any() and np.isfinite(report.seconds).any() for report in fed)
    assert any(report.proposed.any() for _, report in engine.orders_and_reports)


def test_answers_with_each_member_equal_plain(engine: OrderedBench, reference: list[list[int]]) -> None:
    for give in (all_members(), all_members(1), by_turns):
        assert engine.run(SHORT, give, arrive_every=2) == reference
        assert all(not report.failures for _, report in engine.orders_and_reports)
        assert all(engine.proposed(member) for member in range(len(engine.names)))
        rights = [engine.right(member, reference) for member in range(len(engine.names))]
        assert all(right for right, _ in rights), "some of each member's tokens are accepted"
        assert any(right < tried for right, tried in rights), "some tokens are rejected"


def test_proposals_come_from_the_ordered_member(engine: OrderedBench, reference: list[list[int]]) -> None:
    """A lookup that finds nothing proposes nothing, and no other member proposes unless that is ordered."""
    assert engine.run(SHORT, by_turns, arrive_every=2) == reference
    for order, report in engine.orders_and_reports:
        proposing = report.proposed > 0
        assert (report.proposer[proposing] == order.chosen[proposing]).all()
        assert (report.proposed[proposing] <= order.passes[report.proposer[proposing]]).all()
        assert (np.isfinite(report.seconds) == (order.passes != IDLE)).all()


def test_member_runs_exactly_the_ordered_passes(engine: OrderedBench, reference: list[list[int]]) -> None:
    assert engine.run(SHORT, by_turns, arrive_every=2) == reference
    for member in engine.forwards:
        ordered_passes = [int(order.passes[member]) for order, _ in engine.orders_and_reports]
        assert engine.forwards[member] == sum(max(1, passes) for passes in ordered_passes if passes != IDLE)
    assert engine.run(SHORT, no_member) == reference
    assert not engine.forwards


def test_member_that_raises_loses_its_proposals_only(engine: OrderedBench, reference: list[list[int]]) -> None:
    def fail(*_arguments: object, **_keywords: object) -> None:
        raise RuntimeError("the draft fell over")

    broken, others = 0, range(1, len(engine.names))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.member(broken), "propose", fail)
        assert engine.run(SHORT, all_members()) == reference
    assert not engine.proposed(broken)
    assert all(engine.proposed(other) for other in others)
    assert all(set(report.failures) == {broken} for _, report in engine.orders_and_reports)
    assert all(math.isnan(report.seconds[broken]) for _, report in engine.orders_and_reports)
    assert engine.run(SHORT, all_members()) == reference
    assert engine.proposed(broken), "used again"


def test_member_proposes_the_same_with_others_as_alone(engine: OrderedBench, reference: list[list[int]]) -> None:
    """Bugs: a head's first pass wrote its KV where another member's last pass had put the slots; a head got hidden
    states of layers that another one reads."""
    assert engine.run(SHORT, all_members()) == reference
    together, neural = dict(engine.scheduler.proposals), list(engine.forwards)
    for member in neural:

        def alone(_step: int, _requests: list[str], order: DraftOrder, member: int = member) -> DraftOrder:
            order.passes[member] = MOST
            order.chosen[:] = member
            return order._replace(draft_tokens=MOST)

        assert engine.run(SHORT, alone) == reference
        common = engine.scheduler.proposals.keys() & together.keys()
        assert len({at for at in common if at[0] == member}) > 5
        assert all(engine.scheduler.proposals[at] == together[at] for at in common)


@pytest.mark.parametrize("pool", ["two heads"], indirect=True)
def test_target_hands_out_the_layers_of_all_heads(engine: OrderedBench) -> None:
    assert set(engine.runner.model.model.aux_hidden_state_layers) == {*TWO_HEADS["eagle"], *TWO_HEADS["other"]}


@pytest.mark.parametrize("pool", ["two draft models"], indirect=True)
def test_draft_models_have_separate_kv_gaps(engine: OrderedBench) -> None:
    """The twin idles for ten steps, then runs over what it has missed: from then on it proposes what the other one,
    which saw every token, proposes."""
    skipped, prompt = 10, [STORY]
    seen = {"until": 0}

    def give(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[0], order.chosen[:] = 0, 0
        request = engine.scheduler.requests[requests[0]]
        if step < skipped:
            seen["until"] = request.num_computed_tokens
            return order
        order.passes[1], order.chosen[:] = MOST, 1
        gaps = (KVGap(1, 0, 0, request.num_computed_tokens),) if step == skipped else ()
        return order._replace(draft_tokens=MOST, gaps=gaps)

    def first(_step: int, _requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[0], order.chosen[:] = MOST, 0
        return order._replace(draft_tokens=MOST)

    expected = engine.run(prompt, no_member)
    assert engine.run(prompt, give) == expected
    caught_up = {at[1:]: tokens for at, tokens in engine.scheduler.proposals.items() if at[0] == 1}
    assert engine.run(prompt, first) == expected
    saw_all = {at[1:]: tokens for at, tokens in engine.scheduler.proposals.items()}
    common = caught_up.keys() & saw_all.keys()
    assert len(common) > 2
    assert all(caught_up[at] == saw_all[at] for at in common)


@pytest.mark.parametrize("pool", ["head, draft model and lookup"], indirect=True)
def test_memory_of_each_member_is_measured(engine: OrderedBench) -> None:
    """A token has keys and values of 2 heads of 64 float32 in each layer: 4 of the target, one of each draft. The
    head's weights are its own alone: the target's embedding and output would be 25 MB more each."""
    layer = 2 * 2 * 64 * 4
    assert set(engine.memory) == {"draft", "eagle"}
    head, draft = engine.memory["eagle"], engine.memory["draft"]
    assert (head.kv_bytes_per_token, draft.kv_bytes_per_token) == (layer, layer)
    assert head.concurrency_percent == pytest.approx(100 / 6, abs=0.01)
    assert draft.concurrency_percent == pytest.approx(100 / 6, abs=0.01)
    assert 1e6 < head.weight_bytes < 2e6
    assert draft.weight_bytes > 50e6


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of the model in `source` with other weights."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_unloadable_drafters_leave_the_others(tmp_path: Path) -> None:
    """Bugs: the target handed out what the broken head reads, as vLLM's config names that one; drafters whose
    checkpoints lack weights proposed with what lay in memory, and one without its token map with wrong tokens; one
    without its last norm proposed with ones in its place; one with NaN was said to lack weights, and one with infinity
    was loaded; one whose map names no token of the target's raised an IndexError, and would end an engine on a GPU; one
    whose config names fewer layers than it was made for was said to have an invalid shape."""

    def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
        return lambda weights: weights.pop(name)

    def with_number(number: float) -> Callable[[dict[str, torch.Tensor]], object]:
        return lambda weights: weights["fc.weight"][1].fill_(number)

    def beyond(weights: dict[str, torch.Tensor]) -> None:
        weights["d2t"][7] = 49152

    broken = tmp_path / "broken"
    head_reading(BROKEN_LAYERS, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    lacking = {
        "keys": ("midlayer.self_attn.k_proj.weight", "lacks weights of model.layers.0.self_attn.qkv_proj.weight"),
        "map": ("d2t", "lacks weights of draft_id_to_target_id"),
        "output": ("lm_head.weight", "lacks weights of lm_head.weight"),
        "norm": ("norm.weight", "lacks weights of model.norm.weight"),
    }
    numbers = {"nan": torch.nan, "infinity": -torch.inf}
    heads = [eagle(changed(EAGLE_HEAD, tmp_path / name, without(gone)), name) for name, (gone, _) in lacking.items()]
    heads.append(eagle(changed(EAGLE_HEAD, tmp_path / "beyond", beyond), "beyond"))
    for name, number in numbers.items():
        heads.append(eagle(changed(EAGLE_HEAD, tmp_path / name, with_number(number)), name))
    one_layer = changed(EAGLE_HEAD, tmp_path / "layers", lambda _weights: None)
    config = json.loads((one_layer / "config.json").read_text())
    (one_layer / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": [1]}))
    heads.append(eagle(one_layer, "layers"))
    queries = without("model.layers.2.self_attn.q_proj.weight")
    heads.append(draft_model(changed(POOR_DRAFT, tmp_path / "queries", queries), "queries"))
    other = eagle(head_reading(OTHER_LAYERS, tmp_path / "other"), "other")
    with ordered([eagle(broken, "broken"), eagle(), draft_model(POOR_DRAFT), other, *heads]) as engine:
        assert set(engine.failures) == {"broken", "beyond", "layers", "queries", *lacking, *numbers}
        assert "its model.fc.weight has NaN" in engine.failures["nan"]
        assert "its model.fc.weight has infinite numbers" in engine.failures["infinity"]
        assert "cannot be started" in engine.failures["broken"]
        for name, (_, reason) in lacking.items():
            assert reason in engine.failures[name]
        assert "lacks weights of" in engine.failures["queries"]
        assert "model.layers.2.self_attn.qkv_proj.weight" in engine.failures["queries"]
        assert "fits 3 layers, and its config lists 1 (eagle_aux_hidden_state_layer_ids" in engine.failures["layers"]
        assert "49159" in engine.failures["beyond"]
        assert "49152" in engine.failures["beyond"]
        assert_loaded_drafters_serve(engine, range(1, 4))


def assert_loaded_drafters_serve(engine: OrderedBench, loaded: range) -> None:
    """The first of them is the example's head, which is right only about the layers that it was trained for: the target
    hands out those of both loaded heads, and each finds its own among them."""

    def give(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
        order.passes[list(loaded)] = MOST
        order.chosen[:] = [loaded[(step + place) % len(loaded)] for place in range(len(requests))]
        return order._replace(draft_tokens=MOST)

    assert set(engine.runner.model.model.aux_hidden_state_layers) >= {*READ, *OTHER_LAYERS}
    assert 20e6 < engine.memory[engine.names[loaded[0]]].weight_bytes < 60e6, "its own output, not the embedding"
    reference = engine.run(SHORT, no_member)
    assert engine.run(SHORT, give) == reference
    assert all(engine.proposed(member) for member in loaded)
    trained, first = loaded[0], list[bool]()
    for (member, name, known), tokens in engine.scheduler.proposals.items():
        answer = reference[int(name)][known - engine.prompt_tokens[int(name)] :]
        if member == trained and answer:
            first.append(tokens[0] == answer[0])
    assert sum(first) > 0.2 * len(first) > 0


def test_asynchronous_answers_equal_plain(models: Counting, heads: list[DrafterSpec]) -> None:
    """The engine works as on GPUs: proposals stay on the device, and a step is scheduled before
    the last one's tokens are known."""
    pool = [lookup(), *heads, draft_model(models.draft)]
    with ordered(pool, asynchronous=True, target=models.target) as engine:
        reference = engine.run(SHORT, no_member)
        assert [len(tokens) for tokens in reference] == [OUTPUT_TOKENS] * len(SHORT)
        assert engine.run(SHORT, fed_then_short) == reference
        for give in (all_members(), by_turns):
            assert engine.run(SHORT, give, arrive_every=2) == reference
            assert all(engine.proposed(member) for member in range(4))
            assert all(not report.failures for _, report in engine.orders_and_reports)
