"""Scheduled steps whose output or draft report has not arrived yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.loop.steps import ChainCounts, NodeVerdicts, Record
from outrider_runtime.simulate.replay.device import DeviceStep
from outrider_runtime.simulate.replay.replay_requests import Rows
from outrider_runtime.simulate.replay.workload import Ints


@dataclass(slots=True, eq=False)
class DraftingReport:
    """The proposals at the end of a step; see `loop.steps.DraftingResult`."""

    step: int
    seconds: NDArray[np.float64]
    proposed: NDArray[np.int8]
    proposer: NDArray[np.int8]
    confidence: NDArray[np.int8]
    catch_up_s: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step in flight. Shapes: N requests."""

    record: Record
    rows: Rows
    draft_tokens: Ints
    """(N,): scheduled draft tokens, with or without a proposal."""
    kept: Ints
    """(N,): scheduled draft tokens that the target's pass ran."""
    verified: int
    """Real proposals that the target scored."""
    ran: DeviceStep
    report: DraftingReport
    verdicts: NodeVerdicts | None
    """None: use `counts`."""
    step_s: float
    """Seconds from the end of the step before, or from scheduling, to the end of this one on the device."""
    out_at: float

    @property
    def counts(self) -> ChainCounts:
        """Token counts, as vLLM's scheduler gets them."""
        sampled = np.where(self.ran.tokens > 0, 1 + self.ran.accepted, 0)
        trimmed = self.draft_tokens - self.kept
        return ChainCounts(sampled, self.kept, trimmed if trimmed.any() else None)
