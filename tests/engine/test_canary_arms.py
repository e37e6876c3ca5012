"""A draft canary in vLLM: one engine hosts both pools, each request gets proposals of its arm alone, and its answer is
that of plain decoding.

Real vLLM and a planted target in this process, synchronous as on CPUs and asynchronous as on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from outrider_crds.runtime_config import CanaryConfig
from outrider_crds.spec import SpeculationMode

from tests.engine.engines import OUTPUT_TOKENS, Bench, bench, draft_model, hot_config, lookup
from tests.engine.planted_models import Counting
from tests.engine.test_lossless_speculation import SHORT

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

CANARY = CanaryConfig(id="r1", stable=["pld", "draft-was"], candidate=["pld", "draft"], candidate_percent=50)
ARMS = {"pld": {0, 1}, "draft-was": {0}, "draft": {1}}
"""Drafter -> arms that may ask it. Both draft models are the target itself, so that proposals are accepted."""


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def running(models: Counting, request: pytest.FixtureRequest) -> Iterator[Bench]:
    pool = (lookup(), draft_model(models.target, "draft-was"), draft_model(models.target, "draft"))
    with bench(pool, asynchronous=request.param, target=models.target) as started:
        yield started


@pytest.fixture
def engine(running: Bench) -> Iterator[Bench]:
    running.fresh()
    yield running
    running.loop.configure(hot_config())


def _drafters_by_arm(engine: Bench) -> dict[str, set[int]]:
    """Drafter -> arms of the requests that got its proposals."""
    names, arms = list(engine.loop.numbers), dict[str, set[int]]()
    for step in engine.steps:
        forest, arm = step.outcome.forest, step.outcome.batch.arm
        assert arm is not None
        for drafter, request in zip(forest.drafter.tolist(), forest.request.tolist(), strict=True):
            arms.setdefault(names[drafter], set()).add(int(arm[request]))
    return arms


@pytest.mark.parametrize("mode", [SpeculationMode.CLOSED_LOOP, SpeculationMode.STATIC])
def test_canary_requests_get_their_own_pool_and_plain_answers(engine: Bench, mode: SpeculationMode) -> None:
    engine.loop.pin(0)
    plain = engine.generate(SHORT)
    engine.fresh()
    engine.loop.configure(hot_config(mode).model_copy(update={"canary": CANARY}))
    for _ in range(3):
        assert engine.generate(SHORT, arrive_every=2) == plain
    proposed = _drafters_by_arm(engine)
    assert proposed, "the drafters were asked"
    assert all(arms <= ARMS[drafter] for drafter, arms in proposed.items()), proposed
    assert not engine.loop.failures


def test_state_of_a_canary_counts_every_finished_request(engine: Bench) -> None:
    """The operator judges by nothing else."""
    # The order of the pool is Static's: the draft models come first here, so both arms run one.
    order = {"drafter_order": ["draft-was", "draft", "pld"]}
    hot = hot_config(SpeculationMode.STATIC).model_copy(update={"canary": CANARY, **order})
    engine.loop.configure(hot)
    for _ in range(3):
        engine.generate(SHORT, arrive_every=2)
    engine.generate(SHORT[:1])  # what is scheduled ahead is observed with the steps after it
    canary = engine.scheduler.outrider_reporter.state().canary
    assert canary is not None
    assert canary.id == "r1"
    stable, candidate = canary.stable, canary.candidate
    requests, finished = 3 * len(SHORT), stable.finished["chat"] + candidate.finished["chat"]
    assert finished == requests + 1
    assert requests <= stable.requests + candidate.requests <= finished
    assert stable.tokens + candidate.tokens == (stable.requests + candidate.requests) * (OUTPUT_TOKENS - 1)
    assert min(stable.price_s, candidate.price_s) > 0.0
    proposed = _drafters_by_arm(engine)
    assert proposed == {"draft-was": {0}, "draft": {1}}


def test_drafter_that_raises_is_a_failure_of_its_arm(engine: Bench) -> None:
    engine.loop.pin(0)
    plain = engine.generate(SHORT)
    engine.fresh()
    order = {"drafter_order": ["draft-was", "draft", "pld"]}
    engine.loop.configure(hot_config(SpeculationMode.STATIC).model_copy(update={"canary": CANARY, **order}))

    def fail(*_arguments: object, **_keywords: object) -> None:
        raise RuntimeError("the draft fell over")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner.speculator._members[engine.loop.numbers["draft"]], "propose", fail)
        assert engine.generate(SHORT) == plain
    state = engine.loop.arms.state()
    assert state is not None
    assert (state.stable.failures, state.candidate.failures) == (0, 1)
    engine.loop.resume("draft")


def test_draft_that_proposes_from_nan_costs_its_arm_alone(engine: Bench) -> None:
    """Its weights load, and overflow: all logits are NaN. Answers stay those of plain decoding, and the sums are
    numbers by which the candidate loses."""
    engine.loop.pin(0)
    plain = engine.generate(SHORT)
    engine.fresh()
    order = {"drafter_order": ["draft-was", "draft", "pld"]}
    engine.loop.configure(hot_config(SpeculationMode.STATIC).model_copy(update={"canary": CANARY, **order}))
    number, before = engine.loop.numbers["draft"], engine.loop.state().drafters["draft"]
    with _nan_norms(engine.runner.speculator._members[number].model):
        for _ in range(2):
            assert engine.generate(SHORT, arrive_every=2) == plain
    counts, state = engine.loop.state().drafters["draft"], engine.loop.arms.state()
    assert counts.tried > before.tried
    assert counts.accepted == before.accepted
    assert state is not None
    stable, candidate = state.stable, state.candidate
    assert math.isfinite(candidate.price_s)
    assert candidate.plain_s / candidate.price_s < stable.plain_s / stable.price_s
    assert not engine.loop.failures


@contextmanager
def _nan_norms(model: torch.nn.Module) -> Iterator[None]:
    """The weights of its norms, which no other model shares, are NaN in here."""
    norms = [weight for name, weight in model.named_parameters() if "norm" in name]
    before = [weight.data.clone() for weight in norms]
    for weight in norms:
        weight.data.fill_(torch.nan)
    yield
    for weight, kept in zip(norms, before, strict=True):
        weight.data.copy_(kept)
