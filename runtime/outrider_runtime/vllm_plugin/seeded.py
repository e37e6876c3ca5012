"""Per-request random generators that vLLM's CPU worker can rewind.

When a prefill chunk's sampled token is discarded, vLLM rewinds the request's generator by one draw through its
offset. CPU generators have none, and the error kills the engine for everyone: a request with `seed` whose prompt
is prefilled in chunks is enough. This generator remembers its state before each draw of the step instead, so a
seeded request is served, and repeats itself, on a CPU as on a GPU.
"""

from __future__ import annotations

import torch

DRAW_OFFSET = 4
"""What vLLM subtracts from the offset to take one draw back."""


class RewindableGenerator(torch.Generator):
    """A CPU generator whose offset exists only to be rewound to the last mark."""

    def mark(self) -> None:
        """Remember the present state; call before a step samples."""
        self._marked = self.get_state()

    def get_offset(self) -> int:
        return DRAW_OFFSET

    def set_offset(self, offset: int) -> torch.Generator:
        """Take the step's draws back."""
        if offset != 0:
            raise ValueError(f"offset {offset}: a CPU generator can only be rewound by one step")
        self.set_state(self._marked)
        return self


def rewindable(generator: torch.Generator) -> RewindableGenerator:
    """A generator in the same state as `generator`."""
    copy = RewindableGenerator(device="cpu")
    copy.set_state(generator.get_state())
    copy.mark()
    return copy
