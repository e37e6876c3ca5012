"""A scheduled step whose output, or the report on its drafting, has not arrived yet."""

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
    """`loop.steps.DraftingResult`: what was really proposed at the end of a step."""

    step: int
    seconds: NDArray[np.float64]
    proposed: NDArray[np.int8]
    proposer: NDArray[np.int8]
    confidence: NDArray[np.int8]
    catch_up_s: dict[int, float] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """N requests."""

    record: Record
    rows: Rows
    draft_tokens: Ints
    """(N,) that were scheduled, proposed or not."""
    kept: Ints
    """(N,): scheduled draft tokens that the target's pass ran."""
    verified: int
    """Real proposals that the target scored."""
    ran: DeviceStep
    report: DraftingReport
    verdicts: NodeVerdicts | None
    """None: `counts` say it."""
    step_s: float
    """Seconds for which the step kept the device from the next one."""
    out_at: float

    @property
    def counts(self) -> ChainCounts:
        """Tokens of each request that vLLM's scheduler is given."""
        names = self.record.step.names
        sampled = np.where(self.ran.tokens > 0, 1 + self.ran.accepted, 0)
        trimmed = self.draft_tokens - self.kept
        return ChainCounts(
            dict(zip(names, sampled.tolist(), strict=True)), dict(zip(names, self.kept.tolist(), strict=True)),
            dict(zip(names, trimmed.tolist(), strict=True)) if trimmed.any() else None,
        )  # fmt: skip
