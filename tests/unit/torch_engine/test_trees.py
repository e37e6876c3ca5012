"""Trees under the control loop: whatever is proposed and verified, answers equal plain decoding, and KV caches hold
what a prefill would write."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numba import typeof
from outrider_runtime.control.batch import Batch
from outrider_runtime.control.plans import ROOT, DraftPlan, Forest, Outcome, Purpose, VerifyPlan
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.loop.steps import FinishedStep
from outrider_runtime.torch_engine.batch_scheduler import SchedulerLimits
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, RequestStep, TorchDrafter
from outrider_runtime.torch_engine.drafts.beam import MAX_WIDTH, log_odds
from outrider_runtime.torch_engine.drafts.draft_model_drafter import DraftModelDrafter
from outrider_runtime.torch_engine.drafts.eagle_drafter import EagleDrafter
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel, Segment
from outrider_runtime.torch_engine.tree import Tree, ancestors

from tests.engine import engines
from tests.unit.torch_engine.engines import (
    CPU,
    DRAWN,
    GREEDY,
    LONGEST,
    Harness,
    Letters,
    answers,
    assert_same_as_fresh,
    fresh,
    make_harness,
    pool_of_three,
    texts,
)
from tests.unit.torch_engine.models import FAMILIES, VOCABULARY, write_head, write_model, write_pair

PLD, DRAFT, EAGLE = range(3)
NAMES = ["pld", "draft", "eagle"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft whose proposals are sometimes accepted, and a random head."""
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder, 0.4)
    write_head(folder / "head")
    return folder


def random_subtree(forest: Forest, draws: random.Random) -> np.ndarray:
    """(M,): a random set of nodes in which each has its parent."""
    nodes = np.zeros(len(forest), bool)
    for node, parent in enumerate(forest.parent.tolist()):
        nodes[node] = (parent == ROOT or nodes[parent]) and draws.random() < 0.7
    return nodes


def verify_at_random(harness: Harness, draws: random.Random) -> None:
    """Make the loop verify a random part of the proposals."""

    def plan_verify(batch: Batch, forest: Forest) -> VerifyPlan:
        nodes = random_subtree(forest, draws)
        return VerifyPlan(nodes, np.bincount(forest.request[nodes], minlength=len(batch)), Purpose.FIXED)

    harness.loop.plan_verify = plan_verify  # type: ignore[method-assign]


def draft_in_order(harness: Harness, orders: Iterator[tuple[list[int], int, int]]) -> None:
    """Make the loop draft as `orders` say. Each order: drafters, whose trees are merged, depth and width."""

    def plan_draft(batch: Batch) -> DraftPlan:
        drafters, depth, width = next(orders)
        passes, widths = np.zeros(3, np.int64), np.ones(3, np.int64)
        passes[drafters] = depth
        widths[[drafter for drafter in drafters if drafter != PLD]] = width
        ranks = np.tile(np.array(drafters or [-1])[:, None], (1, len(batch)))
        feed = np.where(passes[:, None] > 0, batch.missing, 0)
        return DraftPlan(passes, widths, ranks, feed, Purpose.FIXED)

    harness.loop.plan_draft = plan_draft  # type: ignore[method-assign]


def orders(draws: random.Random, most: int = 2) -> Iterator[tuple[list[int], int, int]]:
    while True:
        yield draws.sample(range(3), draws.randint(0, most)), draws.choice([1, 2, 4]), draws.randint(1, MAX_WIDTH)


class Oracle:
    """Drafter that knows the answers, and hides them among random tokens in trees of random shapes."""

    weight_bytes = kv_bytes_per_token = 0
    layers = ()

    def __init__(self, known: dict[tuple[int, ...], list[int]], draws: random.Random) -> None:
        self._known, self._draws = known, draws

    def catch_up(self, gaps: Sequence[tuple[Request, KVGap]]) -> None: ...

    def propose(self, step: CommittedStep, task: DraftTask) -> list[Tree]:
        return [
            self._tree(request_step.request, task) if is_requested else Tree()
            for request_step, is_requested in zip(step.request_steps, task.is_requested, strict=True)
        ]

    def forget(self, request: str) -> None: ...

    def _tree(self, request: Request, task: DraftTask) -> Tree:
        draws, tree = self._draws, Tree()
        answer = self._known[tuple(request.tokens[: request.prompt_tokens])][request.emitted :]
        correct_end = ROOT  # last node of the path that is the answer
        for _ in range(draws.randint(0, 14)):
            parent = draws.choice([correct_end, draws.randint(ROOT, len(tree) - 1)])
            depth = 0 if parent == ROOT else tree.depths[parent]
            is_correct = parent == correct_end and depth < len(answer) and draws.random() < 0.7
            node = tree.add(answer[depth] if is_correct else draws.randrange(12), parent, task.drafter, 0.0)
            if parent == correct_end and depth < len(answer) and tree.tokens[node] == answer[depth]:
                correct_end = node
        return tree


@pytest.mark.parametrize("seed", [1, 2])
def test_answer_with_random_trees_equals_plain(
    models: Path, plain: list[list[int]], sampling: Sampling, seed: int
) -> None:
    """Random parts of random trees are verified, while memory is short and prefills come in chunks."""
    known, draws = {tuple(text): answer for text, answer in zip(texts(), plain, strict=True)}, random.Random(seed)
    harness = make_harness(
        models / "target", [engines.lookup()], lambda *_: [Oracle(known, draws)], kv_tokens=LONGEST + 60,
        limits=SchedulerLimits(4, 40), draft_bytes=[0],
    )  # fmt: skip
    outcomes = list[Outcome]()
    harness.loop.listeners.append(lambda report: outcomes.append(report.outcome))
    harness.loop.pin(4, "pld")
    verify_at_random(harness, draws)
    assert answers(harness, sampling) == plain
    forests = [outcome.forest for outcome in outcomes]
    assert any((forest.rank > 0).any() for forest in forests)
    branches = sum(int((outcome.accepted & outcome.verified & (outcome.forest.rank > 0)).sum()) for outcome in outcomes)
    unverified = sum(int((outcome.accepted & ~outcome.verified).sum()) for outcome in outcomes)
    assert branches > 10
    assert unverified > 20


def test_answer_with_merged_beams_equals_plain(models: Path, plain: list[list[int]], sampling: Sampling) -> None:
    """Drafters, depths and widths change at every step, several drafters' trees are merged, memory is short."""
    harness = make_harness(
        models / "target", **pool_of_three(models), kv_tokens=LONGEST + 120, limits=SchedulerLimits(4, 60)
    )
    draws, outcomes = random.Random(4), list[Outcome]()
    harness.loop.listeners.append(lambda report: outcomes.append(report.outcome))
    draft_in_order(harness, orders(draws, most=3))
    assert answers(harness, sampling) == plain
    assert harness.engine.free_kv_bytes == harness.engine._pool.total_bytes
    assert harness.loop.failures == 0
    kept = np.concatenate([outcome.forest.drafter[outcome.accepted & outcome.verified] for outcome in outcomes])
    assert {PLD, DRAFT} <= set(kept.tolist())  # the head is random: it is seldom right
    assert any((outcome.accepted & (outcome.forest.rank > 0)).any() for outcome in outcomes)


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_answer_with_pinned_beam_equals_plain(
    models: Path, drafter: str, plain: list[list[int]], sampling: Sampling
) -> None:
    harness = make_harness(models / "target", **pool_of_three(models), limits=SchedulerLimits(4, 80))
    harness.loop.pin(4, drafter, MAX_WIDTH)
    assert answers(harness, sampling) == plain
    assert harness.loop.state().drafters[drafter].verified > 0
    if drafter == "draft":
        with_chains = make_harness(models / "target", **pool_of_three(models), limits=SchedulerLimits(4, 80))
        with_chains.loop.pin(4, drafter)
        assert answers(with_chains, sampling) == plain
        assert harness.loop.state().tally.steps < with_chains.loop.state().tally.steps


def test_outcomes_of_tree_steps_are_consistent(models: Path) -> None:
    """A node is accepted or verified only with its parent; each token was drawn after a root or an accepted node."""
    harness = make_harness(models / "target", **pool_of_three(models), limits=SchedulerLimits(4, 60))
    draws, outcomes = random.Random(3), list[Outcome]()
    harness.loop.listeners.append(lambda report: outcomes.append(report.outcome))
    draft_in_order(harness, orders(draws))
    verify_at_random(harness, draws)
    answers(harness, DRAWN)
    for outcome in outcomes:
        parent, top = outcome.forest.parent, outcome.forest.parent == ROOT
        for marks in (outcome.verified, outcome.accepted):
            assert (top | marks[parent])[marks].all()
        assert (outcome.tried == (top | (outcome.accepted & outcome.verified)[parent])).all()
        drew = (outcome.batch.prompt_left == 0).sum()
        assert outcome.tokens == drew + (outcome.accepted & outcome.verified).sum()
        for request, node in {
            *zip(outcome.forest.request[outcome.accepted], outcome.forest.depth[outcome.accepted], strict=True)
        }:
            same = (outcome.forest.request == request) & (outcome.forest.depth == node) & outcome.accepted
            assert same.sum() == 1


def test_columns_of_outcomes_have_the_types_of_compiled_code(models: Path) -> None:
    """Bug: confidences of a lookup alone were whole numbers, and verdicts every third flag of an array. numba compiled
    for either between two steps: half a minute in which no request got a token."""
    harness, types = make_harness(models / "target", **pool_of_three(models)), set[object]()

    def note(report: FinishedStep) -> None:
        outcome = report.outcome
        types.add(typeof((outcome.forest.columns, outcome.verified, outcome.accepted, outcome.tried)))

    harness.loop.listeners.append(note)
    draft_in_order(harness, orders(random.Random(3)))
    answers(harness, GREEDY)
    whole, real, flags = np.zeros(1, np.int64), np.zeros(1), np.zeros(1, bool)
    assert types == {typeof(((*[whole] * 5, real), flags, flags, flags))}


@pytest.mark.parametrize("family", ["SmolLM2", "Qwen3", "Llama 3 with scaled rotations"])
def test_tree_node_attends_to_its_path_only(family: str, tmp_path: Path) -> None:
    """A node's logits equal those of its path run as a separate sequence, also when the tree is run in two parts."""
    write_model(tmp_path, **FAMILIES[family])
    model = CachedModel(tmp_path, 0, dtype=torch.float32, device=CPU)
    pool, draws = KVPool(1 << 24, [model.cache.bytes_per_token], LONGEST), random.Random(5)
    text = [draws.randrange(VOCABULARY) for _ in range(30)]
    for attempt in range(4):
        tree = Tree()
        for _ in range(20):
            tree.add(draws.randrange(VOCABULARY), draws.randint(ROOT, len(tree) - 1), 0, 0.0)
        assert pool.grow(Holder(0, "r"), 100)
        model.cache.forget("r")
        model.run([Segment("r", text, 0)], pool)
        visible, cut = ancestors(tree.parents), draws.randint(1, 19)
        parts = [slice(0, cut), slice(cut, 20)] if attempt else [slice(0, 20)]
        made = [
            model.decoder.logits(
                model.run([Segment("r", tree.tokens[part], 30, visible[part, : part.stop])], pool).last
            )
            for part in parts
        ]  # fmt: skip
        for node, logits in enumerate(torch.cat(made)):
            name = f"{attempt} {node}"
            sequence = text + tree.path(node)
            assert pool.grow(Holder(0, name), len(sequence))
            alone = model.decoder.logits(model.run([Segment(name, sequence, 0)], pool).last)[-1]
            assert (logits - alone).abs().max() < 1e-4


@pytest.mark.parametrize("width", [1, 3])
def test_beam_keeps_most_probable_children_and_greedy_chain(models: Path, width: int) -> None:
    """The reference is a search that runs each path as a separate sequence (AdaServe, section 4.1)."""
    draft = CachedModel(models / "draft", 1, dtype=torch.float32, device=CPU)
    pool = KVPool(1 << 24, [1, draft.cache.bytes_per_token], LONGEST)
    several = texts(3)
    requests = [
        Request(f"r{number}", text, len(text), Stops(99), GREEDY, Letters()) for number, text in enumerate(several)
    ]
    request_steps = [
        RequestStep(request, row, 0, range(len(request.tokens) - 1)) for row, request in enumerate(requests)
    ]
    for request in requests:
        request.computed = len(request.tokens) - 1
    trees = DraftModelDrafter(draft, pool).propose(
        CommittedStep(request_steps, {}), DraftTask(7, [True, False, True], 4, width)
    )
    assert not len(trees[1])
    for request, tree in ((requests[0], trees[0]), (requests[2], trees[2])):
        expected = searched(draft, pool, request.tokens, depth=4, width=width)
        assert [tuple(tree.path(node)) for node in range(len(tree))] == [path for path, _ in expected]
        for node, (_, logprob) in enumerate(expected):
            assert tree.confidences[node] == pytest.approx(log_odds(logprob), abs=1e-3)
        assert set(tree.drafters) == {7}
        assert draft.cache.length(request.name) == len(request.tokens)


Scored = tuple[tuple[int, ...], float]


def searched(model: CachedModel, pool: KVPool, text: list[int], depth: int, width: int) -> list[Scored]:
    """List the paths of a beam, depth by depth, each with the log-probability of its last token."""
    last, kept = list[Scored]([((), 0.0)]), list[Scored]()
    greedy: tuple[int, ...] = ()
    for _ in range(depth):
        children = list[tuple[float, tuple[int, ...], float]]()
        for path, total in last:
            assert pool.grow(Holder(1, "alone"), len(text) + depth)
            model.cache.forget("alone")
            logits = model.decoder.logits(model.run([Segment("alone", [*text, *path], 0)], pool).last[-1:])[0]
            edges = enumerate(logits.log_softmax(-1).tolist())
            children += [(total + edge, (*path, token), edge) for token, edge in edges]
        children.sort(reverse=True)
        chain = next(child for child in children if child[1][:-1] == greedy)
        greedy, best = chain[1], children[:width]
        if chain not in best:
            best[-1] = chain
        last = [(path, total) for total, path, _ in best]
        kept += [(path, edge) for _, path, edge in best]
    return kept


@pytest.mark.slow
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), room=st.integers(0, 1000), budget=st.integers(20, 80))
def test_kv_caches_equal_fresh_prefill(models: Path, seed: int, room: int, budget: int) -> None:
    """Holds for target, draft model and head after any interleaving of accepted and rejected tokens, plain steps, other
    drafters, preemptions and aborts."""
    drafters, draws = list[TorchDrafter](), random.Random(seed)
    harness = make_harness(
        models / "target", **pool_of_three(models, drafters), kv_tokens=LONGEST + room,
        limits=SchedulerLimits(4, budget),
    )  # fmt: skip
    draft_in_order(harness, orders(draws))
    verify_at_random(harness, draws)
    names = [harness.add(text, 25, draws.choice([GREEDY, DRAWN])) for text in texts(4)]
    target, (_, draft, head) = harness.engine._models.target, drafters
    assert isinstance(draft, DraftModelDrafter)
    assert isinstance(head, EagleDrafter)
    while harness.engine.has_work:
        harness.step()
        if draws.random() < 0.03:
            harness.engine.abort(draws.choice(names))
        for request in harness.engine.scheduler.running:
            for model in (target, draft.model):
                assert_same_as_fresh(model, request.name, request.tokens)
            assert_entries_of_fresh_head(head, target, request)
    assert harness.loop.failures == 0
    assert not any(cache._requests for cache in (target.cache, draft.model.cache, head.cache))


def assert_entries_of_fresh_head(head: EagleDrafter, target: CachedModel, request: Request) -> None:
    """Check a head's KV: entries may be missing, and the others are in order, at most one for each token."""
    length = head.cache.length(request.name)
    if not length:
        return
    ours = head.cache[request.name].buffer[:, :, :, :length].clone()
    tokens = request.tokens[: request.computed + 1]
    _, hidden = fresh(target, tokens[:-1], head.weights.layers)
    name, pool = "fresh", KVPool(1 << 24, [1, 1, 1, head.cache.bytes_per_token], LONGEST)
    pool.grow(Holder(head.number, name), len(tokens))
    states = head.weights.fuse(hidden.layer_inputs, torch.arange(len(tokens) - 1))
    whole, head._pool = head._pool, pool
    head._pass([Segment(name, tokens[1:], 0)], states)
    head._pool = whole
    theirs = head.cache[name].buffer[:, :, :, : len(tokens) - 1].clone()
    head.cache.forget(name)
    place = -1
    for entry in range(length):
        errors = (theirs[:, :, :, place + 1 :] - ours[:, :, :, entry, None]).abs().amax((0, 1, 2, 4))
        assert len(errors)
        assert errors.min() < 1e-4
        place += 1 + int((errors < 1e-4).nonzero()[0])
