"""Several heads and draft models live in one engine: greedy answers stay those of plain decoding, token for token, and
each request gets the proposals of the ordered member.

Real vLLM, real SmolLM2, in this process; what each step drafts is ordered by the test.
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
from outrider_crds.spec import DrafterSpec
from outrider_runtime.control.data.batch import NO_DRAFTER
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.vllm_plugin.messages import IDLE, DraftOrder
from safetensors.torch import load_file, save_file

from tests.engine.engines import (
    EAGLE_HEAD,
    OUTPUT_TOKENS,
    POOR_DRAFT,
    SMALL,
    TARGET,
    draft_model,
    eagle,
    head_reading,
    lookup,
)
from tests.engine.ordered import Giver, OrderedBench, ordered
from tests.engine.test_speculation_is_lossless import SHORT, STORY

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
MOST = 3
OTHER_LAYERS = [1, 11, 21]
"""Layers of the target, which outputs those of 2, 15 and 27 if a head names none."""
TWO_HEADS = {"eagle": (1, 2, 4), "other": (0, 2, 3)}
"""Layers of the small target that each head reads."""


@pytest.fixture(scope="module")
def other_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's head as one that reads layers of its own."""
    return head_reading(OTHER_LAYERS, tmp_path_factory.mktemp("heads") / "other-layers")


@pytest.fixture(scope="module", params=["two heads", "head, draft model and lookup", "two draft models"])
def pool(request: pytest.FixtureRequest, other_layers: Path) -> tuple[DrafterSpec, ...]:
    return {
        "two heads": (eagle(), eagle(other_layers, "other")),
        "head, draft model and lookup": (draft_model(POOR_DRAFT), lookup(), eagle()),
        "two draft models": (draft_model(POOR_DRAFT), draft_model(POOR_DRAFT, "twin")),
    }[request.param]


@pytest.fixture(scope="module")
def engine(pool: tuple[DrafterSpec, ...]) -> Iterator[OrderedBench]:
    heads = any(drafter.eagle is not None for drafter in pool)
    with ordered(pool, target=TARGET if heads else SMALL) as started:
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


def test_a_member_that_was_fed_alone_then_proposes_fewer_tokens_than_the_most(
    engine: OrderedBench, reference: list[list[int]]
) -> None:
    """Bug: the padding of K = 0, and that behind a smaller K, was taken for nonsense, and the drafter suspended."""
    assert engine.run(SHORT, fed_then_short) == reference
    assert all(not report.failures for _, report in engine.orders_and_reports)
    fed = [report for order, report in engine.orders_and_reports if not order.draft_tokens and order.passes.max() == 0]
    assert fed
    assert all(not report.proposed.any() and np.isfinite(report.seconds).any() for report in fed)
    assert any(report.proposed.any() for _, report in engine.orders_and_reports)


def test_answers_are_those_of_plain_decoding(engine: OrderedBench, reference: list[list[int]]) -> None:
    for give in (all_members(), all_members(1), by_turns):
        assert engine.run(SHORT, give, arrive_every=2) == reference
        assert all(not report.failures for _, report in engine.orders_and_reports)
        assert all(engine.proposed(member) for member in range(len(engine.names)))


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


def test_a_member_that_raises_costs_its_own_proposals_only(engine: OrderedBench, reference: list[list[int]]) -> None:
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
    together = dict(engine.scheduler.proposals)
    for member in range(len(engine.names)):

        def alone(_step: int, _requests: list[str], order: DraftOrder, member: int = member) -> DraftOrder:
            order.passes[member] = MOST
            order.chosen[:] = member
            return order._replace(draft_tokens=MOST)

        assert engine.run(SHORT, alone) == reference
        common = engine.scheduler.proposals.keys() & together.keys()
        assert len({at for at in common if at[0] == member}) > (5 if member in engine.forwards else 0), (
            "lookups find few"
        )
        assert all(engine.scheduler.proposals[at] == together[at] for at in common)


@pytest.mark.parametrize("pool", ["two heads"], indirect=True)
def test_heads_read_the_layers_that_they_were_trained_on(engine: OrderedBench, reference: list[list[int]]) -> None:
    """The target hands out the layers of all heads, and each finds its own among them."""
    assert set(engine.runner.model.model.aux_hidden_state_layers) == {2, 15, 27, *OTHER_LAYERS}
    assert engine.run(SHORT, all_members()) == reference
    encode, right = engine.llm.get_tokenizer().encode, list[bool]()
    for (member, name, known), tokens in engine.scheduler.proposals.items():
        answer = reference[int(name)][known - len(encode(SHORT[int(name)])) :]
        if member == 0 and answer:
            right.append(tokens[0] == answer[0])
    assert sum(right) > 0.2 * len(right) > 0


@pytest.mark.parametrize("pool", ["two draft models"], indirect=True)
def test_each_draft_model_has_gaps_of_its_own(engine: OrderedBench) -> None:
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
def test_what_each_member_takes_is_measured(engine: OrderedBench) -> None:
    """A token has keys and values of 3 heads of 64 float32 in each of 30, 1 and 4 layers. The head's weights are its
    own alone: the target's embedding would be 113 MB more."""
    layer = 2 * 3 * 64 * 4
    assert set(engine.memory) == {"draft", "eagle"}
    head, draft = engine.memory["eagle"], engine.memory["draft"]
    assert (head.kv_bytes_per_token, draft.kv_bytes_per_token) == (layer, 4 * layer)
    assert head.concurrency_percent == pytest.approx(100 / 35, abs=0.01)
    assert draft.concurrency_percent == pytest.approx(400 / 35, abs=0.01)
    assert 20e6 < head.weight_bytes < 60e6
    assert draft.weight_bytes > 100e6


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of the model in `source` with other weights."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_drafters_that_cannot_load_leave_the_others(other_layers: Path, tmp_path: Path) -> None:
    """Bugs: the target handed out what the broken head reads, as vLLM's config names that one; drafters whose
    checkpoints lack weights proposed with what lay in memory, and one without its token map with wrong tokens; one
    whose map names no token of the target's raised an IndexError, and would end an engine on a GPU; one whose config
    names fewer layers than it was made for was said to have an invalid shape."""

    def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
        return lambda weights: weights.pop(name)

    def beyond(weights: dict[str, torch.Tensor]) -> None:
        weights["d2t"][7] = 49152

    broken = tmp_path / "broken"
    shutil.copytree(other_layers, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    lacking = {
        "keys": ("midlayer.self_attn.k_proj.weight", "lacks weights of model.layers.0.self_attn.qkv_proj.weight"),
        "map": ("d2t", "lacks weights of draft_id_to_target_id"),
        "output": ("lm_head.weight", "lacks weights of lm_head.weight"),
    }
    heads = [eagle(changed(EAGLE_HEAD, tmp_path / name, without(gone)), name) for name, (gone, _) in lacking.items()]
    heads.append(eagle(changed(EAGLE_HEAD, tmp_path / "beyond", beyond), "beyond"))
    one_layer = changed(EAGLE_HEAD, tmp_path / "layers", lambda _weights: None)
    config = json.loads((one_layer / "config.json").read_text())
    (one_layer / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": [1]}))
    heads.append(eagle(one_layer, "layers"))
    queries = without("model.layers.2.self_attn.q_proj.weight")
    heads.append(draft_model(changed(POOR_DRAFT, tmp_path / "queries", queries), "queries"))
    with ordered([eagle(broken, "broken"), eagle(), draft_model(POOR_DRAFT), *heads]) as engine:
        assert set(engine.failures) == {"broken", "beyond", "layers", "queries", *lacking}
        assert "cannot be started" in engine.failures["broken"]
        for name, (_, reason) in lacking.items():
            assert reason in engine.failures[name]
        assert "lacks weights of" in engine.failures["queries"]
        assert "model.layers.2.self_attn.qkv_proj.weight" in engine.failures["queries"]
        assert "of 3 layers, and is to read 1 (eagle_aux_hidden_state_layer_ids" in engine.failures["layers"]
        assert "49159" in engine.failures["beyond"]
        assert "49152" in engine.failures["beyond"]
        reference = engine.run(SHORT, no_member)

        def good(step: int, requests: list[str], order: DraftOrder) -> DraftOrder:
            order.passes[1:3] = MOST
            order.chosen[:] = [1 + (step + place) % 2 for place in range(len(requests))]
            return order._replace(draft_tokens=MOST)

        assert engine.run(SHORT, good) == reference
        assert engine.proposed(1)
        assert engine.proposed(2)


def test_asynchronous_scheduling_loses_nothing(tmp_path: Path) -> None:
    """The engine works as on GPUs: proposals stay on the device, and a step is scheduled before
    the last one's tokens are known."""
    heads = [eagle(head_reading(layers, tmp_path / name), name) for name, layers in TWO_HEADS.items()]
    with ordered([lookup(), *heads, draft_model(POOR_DRAFT)], asynchronous=True, target=SMALL) as engine:
        reference = engine.run(SHORT, no_member)
        assert [len(tokens) for tokens in reference] == [OUTPUT_TOKENS] * len(SHORT)
        assert engine.run(SHORT, fed_then_short) == reference
        for give in (all_members(), by_turns):
            assert engine.run(SHORT, give, arrive_every=2) == reference
            assert all(engine.proposed(member) for member in range(4))
            assert all(not report.failures for _, report in engine.orders_and_reports)
