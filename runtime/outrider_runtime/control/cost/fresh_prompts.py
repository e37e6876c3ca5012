"""How often a new prefill joins a step when none was pending: such a step is not uniform, whatever was planned."""

from __future__ import annotations

from outrider_runtime.control.value import DECAY_PER_STEP


class FreshPrompts:
    """Moving average of P(a step holds prompt tokens | no prefill was pending before it)."""

    def __init__(self) -> None:
        self.share = 0.0
        self._is_pending = False

    def observe(self, prompts: bool, *, is_pending: bool) -> None:
        """Count a step. prompts: it held prompt tokens. is_pending: a prefill goes on in the next step."""
        if not self._is_pending:
            self.share += (1.0 - DECAY_PER_STEP) * (prompts - self.share)
        self._is_pending = is_pending
