"""An asynchronous device whose time a test gives: the host never waits, and hears of a step's drafting a step later.

The real engine runs on the CPU meanwhile; what its passes took there counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outrider_crds.draft_pool import DrafterSpec

from tests.engine.engines import TARGET, Bench, bench


@dataclass
class Device:
    """Its `StepClock`. `now_s`: the end of its queue."""

    target_s: float = 0.010
    pass_s: float = 0.0
    """Seconds of a draft pass."""
    now_s: float = field(default_factory=time.monotonic)
    reached: float = 0.0
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    waited: int = 0

    def mark(self) -> float:
        self.now_s += 1e-9  # no two marks alike
        return self.now_s

    def passed(self, mark: float) -> bool:
        return mark <= self.reached

    def wait(self, _mark: float) -> None:
        self.waited += 1
        self.arrive()

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        there = torch.full_like(values, -77)  # what lies in memory before the copy is done
        self.copies.append((there, values.clone()))
        return there

    @torch.inference_mode()
    def arrive(self) -> None:
        """The device has done all that it was given so far."""
        self.reached = self.now_s
        for there, values in self.copies:
            there.copy_(values)
        self.copies.clear()

    def run_target(self, *_: Any) -> None:
        """A step begins: the host is a step ahead at most."""
        self.arrive()
        self.now_s += self.target_s

    def run_draft(self, *_: Any) -> None:
        self.now_s += self.pass_s


@contextmanager
def on_device(
    device: Device, drafters: list[DrafterSpec], draft: str, *, asynchronous: bool = True, target: Path = TARGET
) -> Iterator[Bench]:
    """An engine whose scheduler and worker live in the device's time. draft: whose passes it times."""
    clock = SimpleNamespace(monotonic=lambda: device.now_s, time=time.time)
    with bench(drafters, asynchronous=asynchronous, target=target) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider_runtime.vllm_plugin.scheduler.time", clock)
        engine.runner._clock = device
        engine.runner.model.register_forward_pre_hook(device.run_target)
        member = engine.runner.speculator._members[engine.loop.numbers[draft]]
        member.model.register_forward_hook(device.run_draft)
        yield engine
