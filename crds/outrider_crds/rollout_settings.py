"""How a changed spec reaches pods."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from outrider_crds.base import Duration, Model


class RolloutStrategy(StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    DRAFT_CANARY = "DraftCanary"


class OnMissingDrafter(StrEnum):
    HOLD = "Hold"
    CONTINUE = "Continue"


class OnInconclusive(StrEnum):
    HOLD = "Hold"
    PROMOTE = "Promote"
    ROLLBACK = "Rollback"


class RolloutCanary(Model):
    pods: Annotated[int, Field(ge=1, le=8)] = 1
    """Canary pods of each product in use. Each hosts both pools."""
    candidate_percent: Annotated[int, Field(ge=1, le=99)] = 50
    """Share of a canary pod's requests that the candidate's drafters propose for."""
    least_gain_percent: Annotated[int, Field(ge=-50, le=100)] = -3
    """Least gain of the candidate, in percent. A negative value lets it be that much worse. It is rolled out once the
    whole range of its gain is above this, and fails once all of the range is below."""
    min_requests: Annotated[int, Field(ge=10, le=1_000_000)] = 100
    """Finished requests of each arm before the first judgement. Below 100 it errs more often if few requests are long.
    With 5% of them 30 times as long, the range missed the true gain in 6% of simulated canaries at 100, and in 11% at
    40, 15% at 20 and 21% at 10."""
    timeout: Duration = "6h"
    """Longest measurement, 1m to 168h; without a verdict by then, onInconclusive says what happens. Time in which no
    canary pod reports, or no operator looks, does not count."""
    on_inconclusive: OnInconclusive = OnInconclusive.HOLD
    """Hold leaves the canary pod for a human to decide, Promote rolls the candidate out, Rollback takes the pod
    away."""


class Rollout(Model):
    strategy: RolloutStrategy = RolloutStrategy.ROLLING_UPDATE
    """RollingUpdate replaces pods within maxSurge and maxUnavailable. DraftCanary first measures a changed draftPool
    against the running one in a canary pod, each on a random share of its requests. It rolls the pool out once its gain
    is above leastGainPercent."""
    canary: RolloutCanary = RolloutCanary()
    """The measurement of strategy DraftCanary."""
    max_surge: Annotated[int, Field(ge=0, le=100)] = 1
    """Pods above `replicas` that a rollout may start."""
    max_unavailable: Annotated[int, Field(ge=0, le=100)] = 0
    """Pods below `replicas` that a rollout may leave. Set 1 where no GPU is free for a surge pod."""
    on_missing_drafter: OnMissingDrafter = OnMissingDrafter.HOLD
    """Hold keeps the old pods until the first new pod reports every drafter of draftPool loaded. Continue replaces them
    even if one is missing."""
    progress_deadline: Duration = "20m"
    """A pod that is not ready after this time makes the rollout Stalled. At least 10s."""
    drain_timeout: Duration = "2m"
    """Running requests of a pod that is being replaced may take this long to finish. At most 24h."""
