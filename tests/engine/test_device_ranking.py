"""The device chooses which proposals the target verifies: how many is ordered, and filler is not among them.

Real vLLM, planted models, asynchronous scheduling as on GPUs, in this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import Batch
from outrider_runtime.control.plans import DeviceOrder, Forest, Purpose, VerifyPlan

from tests.engine.engines import Bench, bench, eagle, lookup
from tests.engine.planted_models import Counting
from tests.engine.test_lossless_speculation import SHORT

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

MOST = 3


def verification_lengths(*arguments: Any) -> torch.Tensor:
    from outrider_runtime.vllm_plugin import cpu_worker  # binds vLLM's kernels before the next line binds others
    from outrider_runtime.vllm_plugin.device_ranking import verification_lengths as lengths

    assert cpu_worker
    return lengths(*arguments)


# -- one pure function ------------------------------------------------------------------------------------------------


@st.composite
def steps(draw: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Survival, caps, forced tokens and the budget of a step. Few values, so that many are equal."""
    requests, longest = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    chances = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0])
    rows = draw(st.lists(st.lists(chances, min_size=longest, max_size=longest), min_size=requests, max_size=requests))
    lengths = st.lists(st.integers(0, longest), min_size=requests, max_size=requests)
    caps, forced = draw(lengths), draw(lengths)
    forced = [min(pair) for pair in zip(caps, forced, strict=True)]
    weights = torch.tensor(draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=requests, max_size=requests)))
    survival = torch.tensor(rows).cumprod(dim=1) * weights[:, None]
    tokens = draw(st.integers(sum(forced), sum(caps)))
    return survival, torch.tensor(caps, dtype=torch.int32), torch.tensor(forced, dtype=torch.int32), tokens


@settings(deadline=None)
@given(steps())
def test_the_budget_is_used_and_never_exceeded(step: Any) -> None:
    survival, caps, forced, tokens = step
    lengths = verification_lengths(survival, caps, forced, tokens)
    assert lengths.sum() == tokens
    assert (lengths <= caps).all()


@settings(deadline=None)
@given(steps())
def test_forced_tokens_that_are_real_are_verified(step: Any) -> None:
    survival, caps, forced, tokens = step
    lengths = verification_lengths(survival, caps, forced, tokens)
    real = (survival > 0).sum(dim=1)
    assert (lengths >= torch.minimum(forced, real)).all()


@settings(deadline=None)
@given(steps())
def test_chosen_prefixes_are_the_likeliest_of_their_size(step: Any) -> None:
    """What is left out scores no higher than what is taken, where nothing is forced; each request's are a prefix."""
    survival, caps, forced, tokens = step
    lengths = verification_lengths(survival, caps, torch.zeros_like(forced), tokens)
    depth = torch.arange(survival.shape[1])
    taken = depth < lengths[:, None]
    left_out = (depth < caps[:, None]) & ~taken
    if taken.any() and left_out.any():
        assert survival[taken].min() >= survival[left_out].max()


@settings(deadline=None)
@given(steps())
def test_filler_is_verified_only_after_all_real_proposals(step: Any) -> None:
    survival, caps, forced, tokens = step
    lengths = verification_lengths(survival, caps, forced, tokens)
    real = torch.minimum((survival > 0).sum(dim=1), caps)
    assert torch.minimum(lengths, real).sum() == min(tokens, int(real.sum()))


def test_equal_scores_are_ranked_by_depth_then_request() -> None:
    survival = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.25]])
    caps, none = torch.tensor([2, 2, 2]), torch.zeros(3, dtype=torch.int32)
    assert verification_lengths(survival, caps, none, 3).tolist() == [2, 1, 0]
    assert verification_lengths(survival, caps, none, 5).tolist() == [2, 2, 1]


@settings(deadline=None)
@given(steps(), st.data())
def test_arm_of_a_canary_gets_its_own_tokens(step: Any, data: Any) -> None:
    """Ranked together, the arm whose proposals are likelier would take the other one's tokens."""
    from outrider_runtime.vllm_plugin.device_ranking import verification_lengths_by_arm

    survival, caps, forced, _ = step
    arm = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=len(caps), max_size=len(caps))))
    parts = []
    for number in range(2):
        own = arm == number
        parts.append(data.draw(st.integers(int(forced[own].sum()), int(caps[own].sum()))))
    lengths = verification_lengths_by_arm(survival, caps, forced, arm, parts)
    for number, part in enumerate(parts):
        own = arm == number
        alone = verification_lengths(survival[own], caps[own], forced[own], part)
        assert lengths[own].tolist() == alone.tolist()


@pytest.mark.parametrize("host_knows_proposals", [True, False])
def test_tokens_of_both_arms_add_up_to_the_batch(host_knows_proposals: bool) -> None:
    """vLLM's runner asks for the number before it asks for the places."""
    ranks = [ranked_steps(40, slots, host_knows_proposals=host_knows_proposals, is_canary=True) for slots in (0, 5)]
    assert all(bool((first == second).all()) for first, second in zip(*ranks, strict=True)), "ranks agree"


def ranked_steps(
    count: int, slots_from: int, *, host_knows_proposals: bool = True, is_canary: bool = False
) -> list[torch.Tensor]:
    """(requests + 1,) for each of `count` steps: where the tokens of its requests begin, as one rank decides."""
    from outrider_runtime.step_clock import HostClock
    from outrider_runtime.vllm_plugin import cpu_worker
    from outrider_runtime.vllm_plugin.device_ranking import DeviceRanking
    from outrider_runtime.vllm_plugin.messages import VerifyOrder, numbers

    assert cpu_worker
    requests, rng, made = 6, np.random.default_rng(0), list[torch.Tensor]()
    names, slots = [f"r{number}" for number in range(requests)], list(range(slots_from, slots_from + requests))
    states = SimpleNamespace(
        num_speculative_steps=MOST, max_num_reqs=16, req_id_to_index=dict(zip(names, slots, strict=True))
    )
    ranking = DeviceRanking(
        SimpleNamespace(
            req_states=states, device=torch.device("cpu"), vocab_size=100,
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
            input_buffers=SimpleNamespace(query_start_loc=torch.zeros(17, dtype=torch.int32)),
        ),
        HostClock(),
    )  # fmt: skip
    ranking.host_knows_proposals = host_knows_proposals
    for _ in range(count):
        chances = torch.from_numpy(rng.choice([0.0, 0.5, 0.9], (requests, MOST)).astype(np.float32)).cummin(dim=1)[0]
        batch = SimpleNamespace(num_reqs=requests, idx_mapping=torch.tensor(slots))
        ranking.record_confidences(chances, batch)
        caps = rng.integers(0, MOST + 1, requests)
        order = VerifyOrder(
            int(rng.integers(0, caps.sum() + 1)), numbers([0] * requests), np.ones(requests, np.float32)
        )
        if is_canary:
            arm = rng.integers(0, 2, requests)
            parts = tuple(int(rng.integers(0, caps[arm == number].sum() + 1)) for number in range(2))
            order = order._replace(tokens=sum(parts), arm=numbers(arm), arm_tokens=parts)
        ranking.begin(order)
        tokens = ranking.get_num_tokens(
            {name: 1 + int(cap) for name, cap in zip(names, caps, strict=True)},
            {name: [0] * int(cap) for name, cap in zip(names, caps, strict=True)},
        )
        _, starts, placeholders, *_ = ranking.reallocate_drafts(names, batch.idx_mapping)
        assert tokens == requests + placeholders
        made.append(starts[: requests + 1].clone())
    return made


# -- in the engine ----------------------------------------------------------------------------------------------------

PROMPTS = (*SHORT, "alpha beta gamma alpha beta gamma alpha beta gamma alpha beta")
"""The last one is what a lookup finds proposals for at once."""


@pytest.fixture(scope="module")
def running(models: Counting) -> Iterator[Bench]:
    with bench((lookup(), eagle(models.head)), asynchronous=True, target=models.target) as started:
        yield started


class Seen:
    """Tokens of each of the target's passes."""

    def __init__(self, engine: Bench) -> None:
        self.tokens: list[int] = []
        self._prepare = engine.runner.prepare_inputs
        engine.runner.prepare_inputs = self._prepared

    def _prepared(self, *arguments: Any, **keywords: Any) -> Any:
        batch = self._prepare(*arguments, **keywords)
        assert int(batch.query_start_loc[batch.num_reqs]) == batch.num_tokens == len(batch.input_ids)
        self.tokens.append(batch.num_tokens)
        return batch


@pytest.fixture
def engine(running: Bench) -> Iterator[Bench]:
    running.fresh()
    ranking = running.runner._ranking
    assert ranking is not None
    yield running
    ranking.host_knows_proposals = True
    running.runner.__dict__.pop("prepare_inputs", None)


@pytest.fixture
def reference(engine: Bench) -> list[list[int]]:
    engine.loop.pin(0)
    plain = engine.generate(PROMPTS)
    engine.fresh()
    return plain


def ran(engine: Bench) -> list[int]:
    """Tokens of each step, as the loop counts them."""
    return [int(step.step.tokens.sum()) for step in engine.steps]


def test_filler_is_not_verified(engine: Bench, reference: list[list[int]]) -> None:
    """Bug: in asynchronous scheduling the target scored a filler token in every placeholder that a lookup found nothing
    for."""
    engine.loop.pin(MOST, "pld")
    seen = Seen(engine)
    assert engine.generate(PROMPTS) == reference
    decoding = [step for step in engine.steps if not step.step.prompt.any()]
    real = [int(step.outcome.verified.sum()) for step in decoding]
    assert [int(step.step.tokens.sum()) for step in decoding] == [
        len(step.step.names) + count for step, count in zip(decoding, real, strict=True)
    ]
    for outcome in (step.outcome for step in decoding):  # only what a request has no tokens left for is left out
        assert (outcome.batch.left[outcome.forest.request[~outcome.verified]] <= MOST + 1).all()
    assert sorted(seen.tokens) == sorted(ran(engine)), "what the target saw is what the loop counts"
    placeholders = sum(MOST * len(step.step.names) for step in decoding)
    assert 0 < sum(real) < placeholders / 2, "most placeholders held nothing"
    assert engine.accepted("pld") > 0


def test_device_verifies_the_ordered_number_asynchronously(engine: Bench, reference: list[list[int]]) -> None:
    """A GPU's batch has its size before the device knows what is real."""
    engine.runner._ranking.host_knows_proposals = False
    lengths = itertools.cycle((0, 3, 1, 0, 2, 3))
    for drafter in ("pld", "eagle"):
        engine.fresh()
        seen = Seen(engine)
        tokens = engine.run(
            [(prompt, {}) for prompt in PROMPTS], arrive_every=2,
            before_step=lambda _step, name=drafter: engine.loop.pin(next(lengths), name),
        )  # fmt: skip
        assert tokens == reference
        assert sorted(seen.tokens) == sorted(ran(engine))


class FixedOrder:
    """The loop's plan with an order that a test gives to the device."""

    def __init__(self, engine: Bench, patch: pytest.MonkeyPatch, order: Callable[[Forest], DeviceOrder]) -> None:
        self.orders: list[tuple[Sequence[int], DeviceOrder]] = []
        self._order = order
        patch.setattr(engine.loop, "plan_verify", self._plan)

    def _plan(self, batch: Batch, forest: Forest) -> VerifyPlan:
        device = self._order(forest)
        self.orders.append((batch.slot.tolist(), device))
        nodes = forest.depth <= device.caps[forest.request]
        return VerifyPlan(nodes, device.caps, Purpose.FIXED, device=device)


def waiting(forest: Forest) -> np.ndarray:
    return np.bincount(forest.request, minlength=forest.drafter_order.shape[1])


@pytest.mark.parametrize("ahead", [False, True], ids=["the host knows", "the host is ahead"])
def test_what_is_left_out_is_no_trial(
    engine: Bench, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """vLLM's scheduler counts tokens that the device left out as rejected: a head would be taken for a poor one."""

    def one_each(forest: Forest) -> DeviceOrder:
        caps = waiting(forest)
        return DeviceOrder(int((caps > 0).sum()), caps, np.minimum(caps, 1), np.ones(len(caps)))

    engine.runner._ranking.host_knows_proposals = not ahead
    engine.loop.pin(MOST, "eagle")
    FixedOrder(engine, monkeypatch, one_each)
    assert engine.generate(PROMPTS) == reference
    outcomes = [step.outcome for step in engine.steps if step.outcome.verified.any()]
    for outcome in outcomes:
        assert not (outcome.tried & ~outcome.verified).any()
    full = [
        outcome for outcome in outcomes if outcome.batch.left.min() > 2 * MOST
    ]  # whose requests can use all proposals
    assert len(full) > 5
    for outcome in full:
        assert (outcome.forest.depth[outcome.verified] == 1).all()
        assert outcome.forest.depth.max() == MOST
        assert outcome.tried.sum() == outcome.verified.sum()


@pytest.mark.parametrize("ahead", [False, True], ids=["the host knows", "the host is ahead"])
def test_forced_tokens_are_kept_and_heavy_requests_come_first(
    engine: Bench, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """Request 0 has next to no weight, but a tight class needs two of its tokens; one place is left, and request 2 is
    the likeliest to use it."""

    def order(forest: Forest) -> DeviceOrder:
        caps = waiting(forest)
        forced, weights = np.zeros_like(caps), np.full(len(caps), 0.5)
        forced[:1], weights[:1], weights[2:3] = np.minimum(caps[:1], 2), 1e-6, 1e6
        return DeviceOrder(min(3, int(caps.sum())), caps, forced, weights)

    engine.runner._ranking.host_knows_proposals = not ahead
    engine.loop.pin(MOST, "eagle")
    FixedOrder(engine, monkeypatch, order)
    assert engine.generate(PROMPTS) == reference
    full = [step.outcome for step in engine.steps if len(step.step.names) == len(PROMPTS)]
    verified = [outcome.forest.request[outcome.verified] for outcome in full]
    lengths = {tuple(np.bincount(requests, minlength=len(PROMPTS)).tolist()) for requests in verified}
    assert (2, 0, 1, *[0] * (len(PROMPTS) - 3)) in lengths


def test_confidence_of_a_head_is_calibrated_for_each_depth(engine: Bench) -> None:
    engine.loop.pin(MOST, "eagle")
    before = engine.loop.calibration
    for _ in range(15):  # of about ten steps each, and a refit comes every hundred
        engine.generate(PROMPTS)
    forests = [step.outcome.forest for step in engine.steps]
    said = np.concatenate([forest.confidence for forest in forests])
    assert np.isfinite(said).all()
    assert len(np.unique(said)) > 20
    accepted = np.concatenate([step.outcome.accepted for step in engine.steps])
    assert said[accepted].mean() > said[~accepted].mean(), "it is surer of what the target accepts"
    after = engine.loop.calibration
    assert before is not None
    assert after is not None
    head = engine.loop.numbers["eagle"]
    assert (after.intercepts[head] != before.intercepts[head]).all()
