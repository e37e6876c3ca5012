"""vLLM's own scheduler on the virtual clock: what the judge charges the host, and what its device chooses."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from outrider_runtime.simulate.replay import ranked_proposals
from outrider_runtime.simulate.replay.workload import Lengths, Workload, draw_closed_load

from tests.engine.test_device_ranking import steps, verification_lengths

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

CLIENTS, REQUESTS = 4, 8
DEVICE_S = 0.0048
"""A step of plain decoding of four requests on an H200 takes no less, and no more than twice that."""


def load(world: str = "llama-3.1-8b-h200") -> Workload:
    from bench.replay.settings import Case, case_recording

    recording = case_recording(Case(world, 0.7))
    return draw_closed_load(CLIENTS, REQUESTS, recording, None, np.random.default_rng(0), Lengths(100, 40))


@cache
def latency_s(host_s: float, *, asynchronous: bool) -> float:
    """Mean request latency of plain decoding, where `schedule` and `update_from_output` take half of host_s each."""
    from bench.host_costs import HostCosts
    from bench.replay.settings import Case, loop_system, setting
    from bench.virtual_clock.engine import Stock, serve

    host = HostCosts((1,), (host_s / 2,), (host_s / 2,)) if host_s else None
    where = setting(Case("llama-3.1-8b-h200", 0.7), loop_system())
    return serve(where, load(), Stock(), None, asynchronous=asynchronous, host=host).latency_s


@pytest.mark.parametrize(("world", "ranks"), [("llama-3.1-8b-h200", True), ("llama-3.1-8b-a100", False)])
def test_device_ranks_proposals_if_attention_takes_any_lengths(world: str, ranks: bool):
    """Bug: the judge wrote the worker's note before the launch removed stale notes, so the loop never let the device
    choose, and figures said to be those of device ranking were those of the host's plans."""
    from bench.replay.settings import Case, loop_system, pool, profile, setting
    from bench.virtual_clock.engine import serve

    case, loops = Case(world, 0.7), []
    model = profile(world, pool(case), 0)
    watch = lambda core: loops.append(core.scheduler.outrider.settings.device_ranks)  # noqa: E731
    serve(setting(case, loop_system()), load(world), None, model, asynchronous=True, watch=watch)
    assert loops == [ranks]


def test_synchronous_steps_wait_for_the_host():
    """Each token of an answer waits for it: 40 tokens at 2 ms are 80 ms."""
    more_s = latency_s(0.002, asynchronous=False) - latency_s(0.0, asynchronous=False)
    tokens = float(load().output.mean())
    assert more_s == pytest.approx(0.002 * tokens, rel=0.15)


def test_asynchronous_steps_hide_a_fast_hosts_time():
    assert latency_s(0.002, asynchronous=True) == pytest.approx(latency_s(0.0, asynchronous=True), rel=0.02)


def test_asynchronous_steps_take_as_long_as_a_slower_host():
    """step_s = max(device_s, host_s)"""
    tokens, host_s = float(load().output.mean()), 4 * DEVICE_S
    assert latency_s(host_s, asynchronous=True) == pytest.approx(host_s * tokens, rel=0.15)


@settings(deadline=None, max_examples=200)
@given(steps())
def test_replay_chooses_what_the_device_chooses(step: Any):
    survival, caps, forced, tokens = step
    by_replay = ranked_proposals.verification_lengths(survival.numpy(), caps.numpy(), forced.numpy(), tokens)
    assert by_replay.tolist() == verification_lengths(survival, caps, forced, tokens).tolist()


def test_replay_trusts_confidences_as_the_device_does():
    import torch
    from outrider_runtime.loop.confidences import UNKNOWN, Calibration
    from outrider_runtime.vllm_plugin.proposed import acceptance

    rng = np.random.default_rng(0)
    lengths, drafters = rng.integers(0, 6, 50), rng.integers(-1, 3, 50)
    quanta = np.where(rng.random((50, 5)) < 0.2, UNKNOWN, rng.integers(-127, 128, (50, 5))).astype(np.int8)
    calibration = Calibration(
        rng.random(3).astype(np.float32), rng.normal(size=(3, 5)).astype(np.float32)
    )  # fmt: skip
    made = np.vstack([lengths, drafters, quanta.T]).astype(np.int8)
    by_device = acceptance(torch.tensor(made), calibration).numpy()
    assert ranked_proposals.acceptance(lengths, drafters, quanta, calibration) == pytest.approx(by_device, abs=1e-5)
