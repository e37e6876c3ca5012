"""What the controller has counted: the part of the pod's state that only it knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Values equal those of the state's `choice.reason`."""

    PAYS = "Pays"
    NOT_WORTH_IT = "NotWorthIt"
    OFF = "Off"
    NO_DRAFTER = "NoDrafter"
    NO_TRAFFIC = "NoTraffic"
    MEASURING = "Measuring"


@dataclass(frozen=True, slots=True)
class DrafterCounters:
    """Counters since the start, and the present estimates, of one drafter."""

    suspended: str = ""
    """Why it does not run, in a sentence; empty when it may."""
    request_steps: int = 0
    """(request, step) pairs in which the target verified at least one of its proposals."""
    tried: int = 0
    verified: int = 0
    accepted: int = 0
    hazards: tuple[float, ...] = ()
    """Estimated probability that position j+1 is accepted, given that those before it were."""
    hit_rate: float = 1.0


@dataclass(frozen=True, slots=True)
class SpeedupCounters:
    """Probe blocks against neighbouring steps of the same batch, both without prefill."""

    probes: int = 0
    baseline_tokens: int = 0
    baseline_s: float = 0.0
    speculative_tokens: float = 0.0
    """Scaled to as many steps as the baseline's."""
    speculative_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ControllerSnapshot:
    reason: Reason
    drafter: str
    """The drafter that most requests of the last steps used; empty for none."""
    draft_tokens: float
    """Mean draft length over the last steps' decoding requests."""
    gated: bool
    """True while the neural draft's forwards are skipped under load."""
    running: int
    """Requests in the last step."""
    learning: bool
    """True while target coefficients are learned because no profile is loaded."""
    goodput_tokens_per_s: float
    """lambda: measured goodput, smoothed."""
    steps: int = 0
    speculative_steps: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    proposed_tokens: int = 0
    draft_length_steps: tuple[int, ...] = ()
    """Per draft length 0..K: (request, step) pairs that verified so many proposals."""
    dropped_steps: int = 0
    decision_s: float = 0.0
    caught_up_tokens: int = 0
    """Tokens that the neural draft ran over to close holes in its KV."""
    catch_up_s: float = 0.0
    """What that took, as far as it was measured."""
    drafters: Mapping[str, DrafterCounters] = field(default_factory=dict)
    speedup: SpeedupCounters = SpeedupCounters()
