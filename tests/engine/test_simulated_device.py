"""The real engine over an asynchronous device with fixed times: what it learns from them, and when the host waits."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from outrider_runtime.loop.steps import FinishedStep
from outrider_runtime.profiler.driver import Driver
from outrider_runtime.profiler.engines.vllm_engine import VLLMEngine
from outrider_runtime.profiler.grid import GridPoint
from outrider_runtime.profiler.host_protocol import VisitOrder
from outrider_runtime.profiler.step_samples import Visit
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.engines import bench, draft_model, eagle, lookup
from tests.engine.planted_models import Counting
from tests.engine.simulated_device import Device, on_device
from tests.engine.test_lossless_speculation import PROMPTS

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
SLOW_FROM, STEPS = 120, 320
FAST_S = 0.005
COUNTING = "one two three four five six one two three four five six one two three"


POINTS = (
    GridPoint(64, 1), GridPoint(64, 4, 2), GridPoint(64, 4, 3), GridPoint(64, 4, 2, uneven=True),
    GridPoint(64, 2, 1, prefill=96), GridPoint(128, 3, 3),
)  # fmt: skip


class Slowing(NamedTuple):
    device: Device
    steps: list[FinishedStep]
    visits: list[Visit]
    """Times read by the profiler, afterwards."""


@pytest.fixture(scope="module")
def slowing(models: Counting) -> Slowing:
    """The target is its own draft, so everything is accepted; a pass takes half of the target's time, later thrice as
    long, and for the profiler half again."""
    device = Device(target_s=0.010, pass_s=FAST_S)

    def before_step(step: int) -> None:
        if step == SLOW_FROM:
            device.pass_s = 3 * FAST_S
        if step == STEPS:
            engine.llm.llm_engine.abort_request(["0", "1"])

    with on_device(device, [draft_model(models.target)], "draft", target=models.target) as engine:
        engine.run([(COUNTING, {"max_tokens": 900})] * 2, before_step=before_step)
        steps = list(engine.steps)
        device.pass_s = FAST_S
        measured = VLLMEngine(engine.llm.llm_engine)
        measured.on_cpu = False  # the device's seconds depend on no core's speed
        driver = Driver(measured)
        visits = [driver.visit(VisitOrder(point, "draft", steps=3, most_steps=3)) for point in POINTS]
        return Slowing(device, steps, visits)


def test_a_draft_that_slows_three_times_lowers_k(slowing: Slowing) -> None:
    """Bug: in asynchronous scheduling the draft's time was part of the target's, so its slowing was never found out."""
    chosen = [int(step.outcome.draft_plan.passes[0]) for step in slowing.steps]
    assert len(chosen) >= STEPS - 5
    assert np.mean(chosen[SLOW_FROM - 40 : SLOW_FROM]) >= 2
    assert np.mean(chosen[-40:]) <= 0.5


def test_device_seconds_are_measured_for_deferred_work(slowing: Slowing) -> None:
    """Bug: the draft's time was what its launch took on the host. Closing a gap takes a pass of its own."""
    device, steps, _ = slowing
    timed = [step.outcome for step in steps if math.isfinite(step.outcome.step_s)]
    assert len(timed) >= 0.9 * len(steps)
    for outcome in timed:
        draft_tokens, passes = int(outcome.draft_plan.passes[0]), outcome.draft_s[0] / FAST_S
        assert outcome.target_s == pytest.approx(device.target_s, abs=1e-4)
        if draft_tokens:
            assert passes == pytest.approx(round(passes), abs=0.01)
            assert round(passes) in (draft_tokens, draft_tokens + 1, 3 * draft_tokens, 3 * draft_tokens + 3)


@pytest.mark.parametrize("place", range(len(POINTS)), ids=map(str, POINTS))
def test_profiler_measures_with_the_serving_scheduler(slowing: Slowing, place: int) -> None:
    """Bug: it scheduled synchronously, so that a GPU's step had the host's work in it. A late report is of the
    ordered shape, prompts included, and its seconds are the device's."""
    point, visit = POINTS[place], slowing.visits[place]
    assert len(visit.samples) >= 2
    for sample in visit.samples:
        assert sample.shape.n_batched == point.batched
        assert sample.shape.n_prompt == point.prefill
        assert sample.draft_tokens == point.verify
        assert sample.target_s == pytest.approx(slowing.device.target_s, abs=1e-4)
        passes = sample.draft_s.get("draft", 0.0) / FAST_S
        assert passes == pytest.approx(round(passes), abs=0.01)
        assert round(passes) in (point.verify, point.verify + 1)


def test_the_host_waits_for_nothing(slowing: Slowing) -> None:
    assert not slowing.device.waited


def test_synchronous_proposals_are_read_once_computed(models: Counting) -> None:
    """vLLM waits for the sampled tokens only: what is drafted after them lies in memory later. Bug: after a step of
    k = 0 whose drafting was not over, proposals were lost, and the lengths of one step met the next one's requests."""
    device, pool = Device(pass_s=0.001), [lookup(), draft_model(models.target)]
    with on_device(device, pool, "draft", asynchronous=False, target=models.target) as engine:
        engine.loop.pin(0)
        plain = engine.generate(PROMPTS)
        engine.fresh()
        lengths = itertools.cycle((0, 3, 3, 1, 0, 2, 3))
        requests = [(prompt, dict[str, Any]()) for prompt in PROMPTS]
        assert (
            engine.run(requests, arrive_every=2, before_step=lambda _: engine.loop.pin(next(lengths), "draft")) == plain
        )
        assert engine.accepted("draft") > 0
        assert device.waited


class NoneOfUsWaits(TorchDispatchMode):
    """A line of ours reads a value of a tensor, or a shape that depends on one: on a GPU the host would wait.
    What vLLM's own lines ask for are tensors that it keeps on the host."""

    WAITS = (
        torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default,
        torch.ops.aten.masked_select.default, torch.ops.aten.is_nonzero.default,
    )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.WAITS:
            assert "/outrider_cpu/" in (asker := _asker()) or "/outrider_runtime/" not in asker, f"{func} in {asker}"
        return func(*args, **(kwargs or {}))


def _asker() -> str:
    """The file of the first line outside torch and this one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame.f_code.co_filename


def test_asynchronous_step_never_waits_for_a_device_value(models: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the host schedules the next step while the device works, with any drafter, filling of gaps included."""
    pool = [lookup(), eagle(models.head), draft_model(models.draft)]
    with bench(pool, asynchronous=True, target=models.target) as engine:
        engine.loop.pin(0)
        plain = engine.generate(PROMPTS)
        engine.fresh()
        engine.runner._ranking.host_knows_proposals = False
        for name in ("execute_model", "sample_tokens"):
            real = getattr(engine.runner, name)

            def watched(*arguments: Any, real: Any = real, **keywords: Any) -> Any:
                with NoneOfUsWaits():
                    return real(*arguments, **keywords)

            monkeypatch.setattr(engine.runner, name, watched)
        for drafter in ("pld", "eagle", "draft"):
            engine.fresh()
            engine.loop.pin(0)  # the first steps leave a gap
            pins = {5: (2, drafter)}

            def pin(step: int, pins: dict[int, tuple[int, str]] = pins) -> None:
                if step in pins:
                    engine.loop.pin(*pins[step])

            assert engine.run([(prompt, {}) for prompt in PROMPTS], arrive_every=1, before_step=pin) == plain
            assert engine.verified(drafter) > 0
