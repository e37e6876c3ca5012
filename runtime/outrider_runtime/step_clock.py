"""Measures the parts of a step with the device's own clock.

A CPU has finished an operation when the call returns. A GPU runs asynchronously: there, marks are CUDA events in the
stream, and the time between two marks is read when the device has passed the second, usually a step later. So no step
waits for the device.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class StepClock(Protocol):
    """Clock of a device."""

    def mark(self) -> Any:
        """Return a mark after everything that was sent to the device so far."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has reached `mark`. Returns at once."""

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached `mark`. Not to be used in an asynchronous step."""

    def seconds(self, first: Any, last: Any) -> float:
        """Return the device time between two marks that the device has passed."""

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        """Copy to the host. The copy is valid once the device has passed a mark made after this call."""


class HostClock:
    """Clock of a CPU, where every operation has finished when its call returns."""

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
    """Clock of a GPU: CUDA events on the current stream."""

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
