"""Trees under the shared loop: whatever was proposed and verified, an answer is that of plain decoding, and caches hold
what they would without it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from outrider_runtime.control.data.batch import Batch
from outrider_runtime.control.data.forest import ROOT, Forest
from outrider_runtime.control.data.plans import DraftPlan, Outcome, Purpose, VerifyPlan
from outrider_runtime.loop.caches import Hole
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
    Bench,
    Letters,
    answers,
    bench,
    fresh,
    pool_of_three,
    same_as_fresh,
    texts,
)
from tests.unit.torch_engine.models import FAMILIES, VOCABULARY, write_head, write_model, write_pair

PLD, DRAFT, EAGLE = range(3)
NAMES = ["pld", "draft", "eagle"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that is sometimes right, and a random head."""
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder, 0.4)
    write_head(folder / "head")
    return folder


def random_subtree(forest: Forest, draws: random.Random) -> np.ndarray:
    """(M,): any set of nodes in which each has its parent."""
    nodes = np.zeros(len(forest), bool)
    for node, parent in enumerate(forest.parent.tolist()):
        nodes[node] = (parent == ROOT or nodes[parent]) and draws.random() < 0.7
    return nodes


def verify_at_random(here: Bench, draws: random.Random) -> None:
    """Whatever was proposed, a part of it that nobody could foresee is verified."""

    def plan_verify(batch: Batch, forest: Forest) -> VerifyPlan:
        nodes = random_subtree(forest, draws)
        return VerifyPlan(nodes, np.bincount(forest.request[nodes], minlength=len(batch)), Purpose.FIXED)

    here.loop.plan_verify = plan_verify  # type: ignore[method-assign]


def ask(here: Bench, orders: Iterator[tuple[list[int], int, int]]) -> None:
    """Who is asked, how deep and how wide, at each step; several for one request are merged."""

    def plan_draft(batch: Batch) -> DraftPlan:
        asked, depth, width = next(orders)
        passes, widths = np.zeros(3, np.int64), np.ones(3, np.int64)
        passes[asked] = depth
        widths[[one for one in asked if one != PLD]] = width
        ranks = np.tile(np.array(asked or [-1])[:, None], (1, len(batch)))
        feed = np.where(passes[:, None] > 0, batch.missing, 0)
        return DraftPlan(passes, widths, ranks, feed, Purpose.FIXED)

    here.loop.plan_draft = plan_draft  # type: ignore[method-assign]


def orders(draws: random.Random, most: int = 2) -> Iterator[tuple[list[int], int, int]]:
    while True:
        yield draws.sample(range(3), draws.randint(0, most)), draws.choice([1, 2, 4]), draws.randint(1, MAX_WIDTH)


class Oracle:
    """Knows the answers, and hides them in trees of any shape among tokens at random."""

    weight_bytes = kv_bytes_per_token = 0
    layers = ()

    def __init__(self, known: dict[tuple[int, ...], list[int]], draws: random.Random) -> None:
        self._known, self._draws = known, draws

    def catch_up(self, gaps: Sequence[tuple[Request, Hole]]) -> None: ...

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
def test_an_answer_is_the_same_with_trees_of_every_shape(
    models: Path, plain: list[list[int]], sampling: Sampling, seed: int
) -> None:
    """Any part of any tree verified, while memory is short and prompts come in chunks."""
    known, draws = {tuple(text): answer for text, answer in zip(texts(), plain, strict=True)}, random.Random(seed)
    here = bench(
        models / "target", [engines.lookup()], lambda *_: [Oracle(known, draws)], kv_tokens=LONGEST + 60,
        limits=SchedulerLimits(4, 40), draft_bytes=[0],
    )  # fmt: skip
    outcomes = list[Outcome]()
    here.loop.listeners.append(lambda told: outcomes.append(told.outcome))
    here.loop.pin(4, "pld")
    verify_at_random(here, draws)
    assert answers(here, sampling) == plain
    forests = [one.forest for one in outcomes]
    assert any((forest.rank > 0).any() for forest in forests)
    branches = sum(int((one.accepted & one.verified & (one.forest.rank > 0)).sum()) for one in outcomes)
    unverified = sum(int((one.accepted & ~one.verified).sum()) for one in outcomes)
    assert branches > 10
    assert unverified > 20


def test_an_answer_is_the_same_whoever_beams(models: Path, plain: list[list[int]], sampling: Sampling) -> None:
    """Drafters, depths and widths change at every step, several drafters' trees are merged, memory is short."""
    here = bench(models / "target", **pool_of_three(models), kv_tokens=LONGEST + 120, limits=SchedulerLimits(4, 60))
    draws, outcomes = random.Random(4), list[Outcome]()
    here.loop.listeners.append(lambda told: outcomes.append(told.outcome))
    ask(here, orders(draws, most=3))
    assert answers(here, sampling) == plain
    assert here.engine.free_kv_bytes == here.engine._pool.total_bytes
    assert here.loop.failures == 0
    kept = np.concatenate([one.forest.drafter[one.accepted & one.verified] for one in outcomes])
    assert {PLD, DRAFT} <= set(kept.tolist())  # the head is random: it is seldom right
    assert any((one.accepted & (one.forest.rank > 0)).any() for one in outcomes)


@pytest.mark.parametrize("drafter", ["draft", "eagle"])
def test_an_answer_is_the_same_with_a_pinned_beam(
    models: Path, drafter: str, plain: list[list[int]], sampling: Sampling
) -> None:
    here = bench(models / "target", **pool_of_three(models), limits=SchedulerLimits(4, 80))
    here.loop.pin(4, drafter, MAX_WIDTH)
    assert answers(here, sampling) == plain
    assert here.loop.state().drafters[drafter].verified > 0
    if drafter == "draft":
        chain = bench(models / "target", **pool_of_three(models), limits=SchedulerLimits(4, 80))
        chain.loop.pin(4, drafter)
        assert answers(chain, sampling) == plain
        steps, steps_of_chains = (one.loop.state().tally.steps for one in (here, chain))
        assert steps < steps_of_chains


def test_what_is_told_of_a_step_adds_up(models: Path) -> None:
    """A node is kept or verified only with its parent; a token is a root's or an accepted node's, and nothing else."""
    here = bench(models / "target", **pool_of_three(models), limits=SchedulerLimits(4, 60))
    draws, seen = random.Random(3), list[Outcome]()
    here.loop.listeners.append(lambda told: seen.append(told.outcome))
    ask(here, orders(draws))
    verify_at_random(here, draws)
    answers(here, DRAWN)
    for one in seen:
        parent, top = one.forest.parent, one.forest.parent == ROOT
        for marks in (one.verified, one.accepted):
            assert (top | marks[parent])[marks].all()
        assert (one.tried == (top | (one.accepted & one.verified)[parent])).all()
        drew = (one.batch.prompt_left == 0).sum()
        assert one.tokens == drew + (one.accepted & one.verified).sum()
        for request, node in {*zip(one.forest.request[one.accepted], one.forest.depth[one.accepted], strict=True)}:
            same = (one.forest.request == request) & (one.forest.depth == node) & one.accepted
            assert same.sum() == 1


@pytest.mark.parametrize("family", ["SmolLM2", "Qwen3", "Llama 3 with scaled rotations"])
def test_a_node_sees_its_path_and_nothing_else(family: str, tmp_path: Path) -> None:
    """Every node's logits are those of its path run as a sequence of its own, whatever else is in the tree; some of the
    tree may have been run over before."""
    write_model(tmp_path, **FAMILIES[family])
    model = CachedModel(tmp_path, 0, dtype=torch.float32, device=CPU)
    pool, draws = KVPool(1 << 24, [model.cache.bytes_per_token], LONGEST), random.Random(5)
    text = [draws.randrange(VOCABULARY) for _ in range(30)]
    for round_ in range(4):
        tree = Tree()
        for _ in range(20):
            tree.add(draws.randrange(VOCABULARY), draws.randint(ROOT, len(tree) - 1), 0, 0.0)
        assert pool.grow(Holder(0, "r"), 100)
        model.cache.forget("r")
        model.run([Segment("r", text, 0)], pool)
        hangs, cut = ancestors(tree.parents), draws.randint(1, 19)
        parts = [slice(0, cut), slice(cut, 20)] if round_ else [slice(0, 20)]
        made = [
            model.decoder.logits(
                model.run([Segment("r", tree.tokens[part], 30, hangs[part, : part.stop])], pool).last
            )
            for part in parts
        ]  # fmt: skip
        for node, logits in enumerate(torch.cat(made)):
            name = f"{round_} {node}"
            sequence = text + tree.path(node)
            assert pool.grow(Holder(0, name), len(sequence))
            alone = model.decoder.logits(model.run([Segment(name, sequence, 0)], pool).last)[-1]
            assert (logits - alone).abs().max() < 1e-4


@pytest.mark.parametrize("width", [1, 3])
def test_a_beam_keeps_the_most_probable_of_all_children_and_the_greedy_chain(models: Path, width: int) -> None:
    """Against a search that runs each path as a sequence of its own (AdaServe, section 4.1)."""
    draft = CachedModel(models / "draft", 1, dtype=torch.float32, device=CPU)
    pool = KVPool(1 << 24, [1, draft.cache.bytes_per_token], LONGEST)
    several = texts(3)
    requests = [
        Request(f"r{number}", text, len(text), Stops(99), GREEDY, Letters()) for number, text in enumerate(several)
    ]
    ran = [RequestStep(one, row, 0, range(len(one.tokens) - 1)) for row, one in enumerate(requests)]
    for one in requests:
        one.computed = len(one.tokens) - 1
    trees = DraftModelDrafter(draft, pool).propose(CommittedStep(ran, {}), DraftTask(7, [True, False, True], 4, width))
    assert not len(trees[1])
    for request, tree in ((requests[0], trees[0]), (requests[2], trees[2])):
        wanted = searched(draft, pool, request.tokens, depth=4, width=width)
        assert [tuple(tree.path(node)) for node in range(len(tree))] == [path for path, _ in wanted]
        for node, (_, logprob) in enumerate(wanted):
            assert tree.confidences[node] == pytest.approx(log_odds(logprob), abs=1e-3)
        assert set(tree.drafters) == {7}
        assert draft.cache.length(request.name) == len(request.tokens)


Scored = tuple[tuple[int, ...], float]


def searched(model: CachedModel, pool: KVPool, text: list[int], depth: int, width: int) -> list[Scored]:
    """Paths, depth by depth, with the log-probability of their last edge."""
    last, found = list[Scored]([((), 0.0)]), list[Scored]()
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
        chain = next(one for one in children if one[1][:-1] == greedy)
        greedy, best = chain[1], children[:width]
        if chain not in best:
            best[-1] = chain
        last = [(path, total) for total, path, _ in best]
        found += [(path, edge) for _, path, edge in best]
    return found


@pytest.mark.slow
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), room=st.integers(0, 1000), budget=st.integers(20, 80))
def test_caches_are_those_of_a_fresh_prefill(models: Path, seed: int, room: int, budget: int) -> None:
    """Target's, draft model's and head's, after any interleaving of accept, reject, k = 0, other drafters, preemption,
    and clients that leave."""
    made, draws = list[TorchDrafter](), random.Random(seed)
    here = bench(
        models / "target", **pool_of_three(models, made), kv_tokens=LONGEST + room, limits=SchedulerLimits(4, budget)
    )  # fmt: skip
    ask(here, orders(draws))
    verify_at_random(here, draws)
    names = [here.add(text, 25, draws.choice([GREEDY, DRAWN])) for text in texts(4)]
    target, (_, draft, head) = here.engine._models.target, made
    assert isinstance(draft, DraftModelDrafter)
    assert isinstance(head, EagleDrafter)
    while here.engine.has_work:
        here.step()
        if draws.random() < 0.03:
            here.engine.abort(draws.choice(names))
        for request in here.engine.scheduler.running:
            for model in (target, draft.model):
                same_as_fresh(model, request.name, request.tokens)
            entries_of_a_fresh_head(head, target, request)
    assert here.loop.failures == 0
    assert not any(cache._requests for cache in (target.cache, draft.model.cache, head.cache))


def entries_of_a_fresh_head(head: EagleDrafter, target: CachedModel, request: Request) -> None:
    """Some of a head's entries may be missing; those that are there stand in order, one for each token at most."""
    length = head.cache.length(request.name)
    if not length:
        return
    ours = head.cache[request.name].buffer[:, :, :, :length].clone()
    tokens = request.tokens[: request.computed + 1]
    _, hidden = fresh(target, tokens[:-1], head.weights.layers)
    name, pool = "fresh", KVPool(1 << 24, [1, 1, 1, head.cache.bytes_per_token], LONGEST)
    pool.grow(Holder(head.number, name), len(tokens))
    states = head.weights.fused(hidden.layer_inputs, torch.arange(len(tokens) - 1))
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
