"""Where the time of a step goes, on the device's own clock.

A CPU is done when the call returns. A GPU runs behind the host: there marks are CUDA events in the stream, and what
lies between two of them is read once the second has passed, as a rule a step later. Nobody waits for the device.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class StepClock(Protocol):
    def mark(self) -> Any:
        """A mark behind everything that the device was given so far."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has reached `mark`; never waits."""

    def wait(self, mark: Any) -> None:
        """Until the device has reached `mark`: never in an asynchronous step."""

    def seconds(self, first: Any, last: Any) -> float:
        """Device time between two marks that have passed."""

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the host, good once a mark made after this call has passed."""


class HostClock:
    """The device is this processor: whatever was asked for has been done."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return mark is not None

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


class CudaClock:
    """Events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last)) / 1000

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return copy.copy_(values, non_blocking=True)


def step_clock(device: torch.device) -> StepClock:
    return HostClock() if device.type == "cpu" else CudaClock()
