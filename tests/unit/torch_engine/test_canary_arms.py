"""A draft canary on the Torch backend: each request gets proposals of its arm alone, and answers are the plain ones."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.runtime_config import CanaryConfig
from outrider_crds.spec import SpeculationMode

from tests.engine.engines import hot_config
from tests.unit.torch_engine.engines import GREEDY, Harness, answers, make_harness, pool_of_three
from tests.unit.torch_engine.models import write_head, write_pair

CANARY = CanaryConfig(id="r1", stable=["pld", "draft"], candidate=["pld", "eagle"], candidate_percent=50)
ARMS = {"pld": {0, 1}, "draft": {0}, "eagle": {1}}
"""Drafter -> arms that may ask it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that is often right, and a random head."""
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder, 0.8)
    write_head(folder / "head")
    return folder


def noted_arms(harness: Harness) -> dict[str, set[int]]:
    """Drafter -> arms of the requests that got its proposals, as the loop observes them."""
    arms, observe, names = defaultdict[str, set[int]](set), harness.loop.observe, list(ARMS)

    def observed(finished: Any) -> None:
        forest, arm = finished.outcome.forest, finished.outcome.batch.arm
        for drafter, request in zip(forest.drafter.tolist(), forest.request.tolist(), strict=True):
            arms[names[drafter]].add(int(arm[request]))
        observe(finished)

    harness.loop.observe = observed  # type: ignore[method-assign]
    return arms


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SpeculationMode.CLOSED_LOOP, SpeculationMode.STATIC])
def test_requests_of_a_canary_get_their_own_pool(models: Path, mode: SpeculationMode) -> None:
    plain = answers(make_harness(models / "target"), GREEDY)
    harness = make_harness(models / "target", **pool_of_three(models))
    order = {"drafter_order": ["draft", "eagle", "pld"], "canary": CANARY}
    harness.loop.configure(hot_config(mode, max_draft_tokens=4).model_copy(update=order))
    arms = noted_arms(harness)
    for _ in range(3):
        assert answers(harness, GREEDY)[-len(plain) :] == plain
    assert {"draft", "eagle"} <= set(arms), "both pools are asked"
    assert all(drafter_arms <= ARMS[drafter] for drafter, drafter_arms in arms.items()), arms
    assert not harness.loop.failures


@pytest.mark.slow
def test_sums_of_a_canary_are_of_every_finished_request(models: Path) -> None:
    """The operator judges by nothing else. The random head costs passes and brings nothing."""
    harness = make_harness(models / "target", **pool_of_three(models))
    order = {"drafter_order": ["draft", "eagle", "pld"], "canary": CANARY}
    harness.loop.configure(hot_config(SpeculationMode.STATIC, max_draft_tokens=4).model_copy(update=order))
    for _ in range(4):
        answers(harness, GREEDY)
    state = harness.loop.arms.state()
    assert state is not None
    requests = state.stable.requests + state.candidate.requests
    assert (state.id, requests) == ("r1", len(harness.answers))
    assert state.stable.tokens + state.candidate.tokens == requests * 39
    assert min(state.stable.price_s, state.candidate.price_s) > 0.0
