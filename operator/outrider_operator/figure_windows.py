"""What the pods of a service counted in a window, which pods and Prometheus tell alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_crds.runtime_state import ServiceCounters


@dataclass(frozen=True)
class WindowCounts:
    """What the pods of a service counted in one window. Pods and Prometheus give the same."""

    window_s: float
    pods_answered: int = 0
    pods_ready: int = 0
    gained: ServiceCounters = field(default_factory=ServiceCounters)
    """Growth in the window."""
    rare: ServiceCounters = field(default_factory=ServiceCounters)
    """Growth in a longer window that ends with it, without classes and adapters: one window has few probes, and few
    trials of a drafter that does not pay."""


@dataclass(frozen=True)
class FigureWindows:
    """The window that ends now and the one before it; None without enough samples."""

    current: WindowCounts | None = None
    previous: WindowCounts | None = None
    error: str = ""
    """Sentence about why there are no figures, such as "Prometheus does not answer"; empty if there are any."""
