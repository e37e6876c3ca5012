"""What a worker may say about a step that is still running on the device, without waiting for it.

In asynchronous scheduling vLLM takes proposals and outputs as device tensors. A look at them would stop the host
until the device is done, which is what asynchronous scheduling is there to avoid.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from outrider_runtime.vllm_plugin.messages import StepReport, attach

SUBSTITUTE = 0
"""Stands for a proposal that failed where places for it were scheduled already. A real token: the target's embedding
has no row for a padding value, and a token that the target did not choose is rejected like any other."""


class ReportedOutput(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM is untyped here
    """An output under way, with our report on its step; vLLM asks for it in its own thread."""

    def __init__(self, output: AsyncModelRunnerOutput, report: StepReport) -> None:
        self._output = output
        self._report = report

    def get_output(self) -> ModelRunnerOutput:
        made = self._output.get_output()
        attach(made, self._report)
        return made


class StrayTokens:
    """Keeps tokens outside the vocabulary from the target, and tells of them as soon as the device has answered."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._answers: deque[tuple[torch.Tensor, Any]] = deque()  # (0-d bool on the host, event or None)

    def replaced(self, proposals: torch.Tensor) -> torch.Tensor:  # (batch, k)
        """`proposals` with a substitute for every token that is none."""
        stray = (proposals < 0) | (proposals >= self._vocabulary_size)
        self._answers.append(_to_host(stray.any()))
        return proposals.masked_fill(stray, SUBSTITUTE)

    def found(self) -> str:
        """A sentence when an answer that has arrived since the last call says so; empty otherwise."""
        stray = False
        while self._answers and (self._answers[0][1] is None or self._answers[0][1].query()):
            stray |= bool(self._answers.popleft()[0])
        return f"it proposed tokens outside the vocabulary of {self._vocabulary_size}" if stray else ""


def _to_host(flag: torch.Tensor) -> tuple[torch.Tensor, Any]:
    if flag.device.type == "cpu":
        return flag, None
    answer = torch.empty((), dtype=torch.bool, pin_memory=True)
    answer.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return answer, event
