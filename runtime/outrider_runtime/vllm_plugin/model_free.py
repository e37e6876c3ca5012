"""Drafters without a model: what the worker asks of each.

vLLM hosts such a drafter only as the engine's one drafter; here each runs beside the others and beside a neural one,
for the requests that the controller chose it for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class History:
    """What is known of a request at the end of a step."""

    request: str
    tokens: Tokens
    """(n,): its prompt and its answer, this step's tokens included."""
    prompt_tokens: int


class ModelFreeHost(Protocol):
    def propose(self, history: History, draft_tokens: int) -> list[int]:
        """Up to `draft_tokens` tokens that may come next, none past the model's longest request."""

    def finished(self, request: str, answer: Sequence[int]) -> None:
        """The request is over; `answer`: every token that it got."""
