"""Who decides in a run: the controller as the manifest sets it, or a fixed draft length to compare it with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from outrider_runtime.control.controller import Controller
from outrider_runtime.control.settings import HotSettings, Mode, Settings
from outrider_runtime.simulate.pod import Pod
from outrider_runtime.vllm_plugin.loop import hot_settings

STATIC_LENGTHS = (1, 3, 5)


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    name: str
    draft_tokens: int | None = None
    """None: ours, as the manifest says."""
    drafter: str | None = None

    def controller(self, pod: Pod, seed: int) -> Controller:
        """As an engine of this pod would build it."""
        hot = hot_settings(pod.hot)
        most = pod.max_draft_tokens
        if self.draft_tokens is not None:
            most = max(most, self.draft_tokens)
            hot = HotSettings(Mode.CLOSED_LOOP, max_draft_tokens=most)
        controller = Controller(
            Settings(pod.specs, most, pod.profile.largest_graph_tokens, hot),
            None if pod.learns else pod.latency,
            clock=time.perf_counter,
            rng=np.random.default_rng([seed, 2]),
        )
        if self.draft_tokens is not None:
            controller.pin(self.draft_tokens, self.drafter)
        return controller


OURS = PolicyChoice("outrider")
NO_SPECULATION = PolicyChoice("no speculation", 0)


def compared(pod: Pod) -> list[PolicyChoice]:
    """Ours, no speculation, and each drafter at each fixed draft length."""
    static = [
        PolicyChoice(f"{drafter.name}, k = {length}", length, drafter.name)
        for drafter in pod.drafters
        for length in STATIC_LENGTHS
    ]
    return [OURS, NO_SPECULATION, *static]
