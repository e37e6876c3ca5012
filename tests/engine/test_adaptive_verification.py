"""The adaptive verification that benchmarks compare with, against vLLM's own code on random inputs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from outrider_runtime.vllm_plugin import arguments

from bench.replay.adaptive import REFIT_STEPS, AcceptanceEstimator, AdaptiveVerification, CostTables, assign, table
from tests.engine import engines

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
SLOTS, K = 12, 5


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    """vLLM's kernels, interpreted on this machine."""
    with engines.own_environment():
        engines.hide_dunders_of_llvmlite()
        arguments.prepare_vllm(worker_is_here=True)
        yield


@pytest.mark.parametrize("seed", range(8))
def test_adaptive_cost_tables_equal_those_of_vllm(seed):
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import build_cost_tables_from_curves

    rng = np.random.default_rng(seed)
    draft = [(size, float(rng.uniform(0.1, 2))) for size in range(1, 9)]
    sizes = np.unique(rng.integers(1, 400, 12)).tolist()
    verify = [(size, float(rng.uniform(1, 9))) for size in sizes]
    graph_tokens = int(rng.choice([0, sizes[len(sizes) // 2], sizes[-1]]))
    theirs = build_cost_tables_from_curves(draft, verify, 12, 500, graph_tokens)
    np.testing.assert_allclose(table(12, draft, graph_tokens), theirs[0])
    np.testing.assert_allclose(table(500, verify, graph_tokens), theirs[1])


@pytest.mark.parametrize("seed", range(8))
def test_adaptive_device_gives_tokens_to_the_same_requests(seed):
    import torch
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import _assign_draft_token_budget

    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.05, 0.95, (SLOTS, K)).astype(np.float32)
    slots = rng.permutation(SLOTS)[:7]
    scheduled = rng.integers(0, K + 1, 7)
    most = int(rng.integers(1, max(2, scheduled.sum())))
    capacities = torch.tensor(scheduled, dtype=torch.int32)
    _assign_draft_token_budget(torch.tensor(confidences), torch.tensor(slots), capacities, most, K)
    assert assign(confidences[slots].astype(np.float64), scheduled, most).tolist() == capacities.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_adaptive_host_budget_equals_that_of_vllm(seed):
    """The tokens of a step, by the confidences of the step before, with prompts in it."""
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    rng = np.random.default_rng(seed)
    costs = CostTables(rng.uniform(0.1, 1, SLOTS + 1), np.cumsum(rng.uniform(0.01, 0.3, 400)))
    ours = AdaptiveVerification(SLOTS, K, costs)
    slots = rng.permutation(SLOTS)[:8]
    for _ in range(2):  # the second brings the first to the host
        ours.step(slots, np.zeros(8, int), np.zeros(8, int), rng.normal(0, 2, (8, K)))
    prompts = np.array([0] * 6 + [40, 60])
    scheduled = np.where(prompts, 0, rng.integers(0, K + 1, 8))
    others = np.where(prompts, prompts, 1)
    names = [str(slot) for slot in slots]
    manager = object.__new__(AdaptiveVerificationManager)
    manager.cost_tables, manager.num_speculative_steps, manager.num_bonus_tokens = (costs.draft, costs.verify), K, 1
    manager._max_total_logits, manager._stale_idx = 10_000, 0
    manager._stale_confidences = [SimpleNamespace(np=ours._stale)]
    left = np.zeros(SLOTS, np.int64)
    left[slots[-1]] = 100  # of the last prompt, more than its chunk
    manager.req_states = SimpleNamespace(
        req_id_to_index=dict(zip(names, slots.tolist(), strict=True)),
        num_computed_tokens_np=np.zeros(SLOTS, np.int64), prefill_len=SimpleNamespace(np=left),
    )  # fmt: skip
    tokens = manager.get_num_tokens(
        dict(zip(names, (others + scheduled).tolist(), strict=True)),
        {name: [0] * count for name, count in zip(names, scheduled.tolist(), strict=True)},
    )
    assert int(ours.keep(slots, others, scheduled, 7).sum()) == tokens - others.sum()


def test_adaptive_estimator_learns_what_that_of_vllm_does():
    """Start values, predictions and two refits over random verdicts."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    rng = np.random.default_rng(0)
    theirs, ours = OnlineAcceptanceEstimator(SLOTS, K, torch.device("cpu")), AcceptanceEstimator(SLOTS, K, 4)
    theirs.REFIT_INTERVAL = 4  # of 100: the kernels are interpreted here
    for _ in range(9):
        slots = rng.permutation(SLOTS)[:4]
        log_odds = rng.uniform(0, 6, (4, K))
        chances = torch.zeros(4, K)
        for depth in range(K):
            logits = torch.tensor(np.stack([log_odds[:, depth], np.zeros(4)], 1), dtype=torch.float32)
            theirs.predict(logits, torch.tensor(slots), torch.tensor(depth), chances, torch.zeros(SLOTS))
        np.testing.assert_allclose(ours.predict(slots, log_odds), chances.numpy(), atol=1e-4)
        verified = rng.integers(0, K + 1, 4)
        accepted = np.minimum(verified, rng.integers(0, K + 1, 4))
        sampled = torch.tensor(accepted + 1, dtype=torch.int32)
        theirs.step(torch.tensor(slots), sampled, torch.tensor(verified - accepted, dtype=torch.int32))
        ours.observe(slots, accepted, verified)
    assert REFIT_STEPS == OnlineAcceptanceEstimator.REFIT_INTERVAL
    assert ours.slope != 0.5
    assert theirs.slope.item() == pytest.approx(ours.slope, abs=1e-4)
    np.testing.assert_allclose(ours.intercepts, theirs.intercepts.numpy(), atol=1e-4)
