"""`status.rollout` and `status.revision`: the draft canary, and how far the rollout of a revision is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from outrider_crds.base import MapList, Model
from outrider_crds.counter_sums import Count
from outrider_crds.counters import ArmCounters
from outrider_crds.texts import Message, Text

MOST_RESTARTED_PODS = 32
"""Pods whose restarts a canary remembers: with more, its record would not fit on the Deployment."""


class RolloutArm(Model):
    name: Text
    """stable (pool of the running revision) or candidate (pool of the spec)."""
    requests: int = 0
    """Finished requests."""
    speedup: Text = ""
    """Time that plain decoding would have taken for its tokens / time that they took, both by the latency model. The
    gain is the candidate's speed-up / the stable's - 1."""
    attainment_percent: Text = ""
    """Share of the requests with an SLO class that met it."""
    failures: int = 0
    """Times that a drafter was suspended after an error."""


class RolloutProduct(Model):
    product: Text
    """One of spec.accelerator.products."""
    requests: int = 0
    """Finished requests of the arm that has fewer."""
    gain_percent: Text = ""
    """Speed-up of candidate / speed-up of stable - 1; empty before minRequests."""
    gain_range: Text = ""
    """Range that holds the true gain for the traffic so far, in 95% of canaries, however often it is read."""
    measured: bool = False
    """True if a canary pod of this product has reported."""


class RolloutSums(Model):
    product: Text
    """Product of the pod."""
    pod: Text = ""
    """Name of a canary pod, which may be gone; empty for processes that ended before."""
    started_at: float = 0.0
    """Unix time at which the pod's process started."""
    restarts: Count = 0
    """Processes of the pod that ended once it was ready with both pools."""
    stable: ArmCounters = ArmCounters()
    """Sums over the stable pool's requests."""
    candidate: ArmCounters = ArmCounters()
    """Sums over the candidate's requests."""


class RolloutStatus(Model):
    """The draft canary in progress, or the last one."""

    phase: Text = ""
    """Starting, Measuring, Promoting; at the end Successful, Failed, Error, Inconclusive, Superseded or Cancelled."""
    cause: Text = ""
    """Cause of the phase, in one word; empty where the phase says it."""
    candidate: Text = ""
    """Revision of the spec. The annotations outrider.dev/promote, abort and retry name it."""
    stable: Text = ""
    """Revision that the candidate is compared with, which the other pods run."""
    observed_generation: int = 0
    """metadata.generation for which the phase was computed."""
    started_at: Text = ""
    """Start of the attempt."""
    candidate_percent: int = 0
    """Share of the canary pod's requests that the candidate gets. With another share the counts start again."""
    requests: int = 0
    """Finished requests of the arm that has fewer."""
    gain_percent: Text = ""
    """Speed-up of candidate / speed-up of stable - 1, on the product with the lowest gain."""
    gain_range: Text = ""
    """Range that holds the true gain for the traffic so far, in 95% of canaries, however often it is read."""
    summary: Text = ""
    """Phase, requests and gain, for the printer column."""
    arms: Annotated[list[RolloutArm], Field(max_length=2), MapList("name")] = []
    """Both pools, summed over products."""
    products: Annotated[list[RolloutProduct], Field(max_length=8), MapList("product")] = []
    """Gain on each product. The candidate must not lose on any."""
    message: Message = ""
    """Result of the measurement, or how much longer it takes at this traffic."""
    detail: Message = ""
    """What the cause is about: a sentence of a pod or the cluster, an SLO class, or the missed leastGainPercent."""
    obeyed: Annotated[list[Text], Field(max_length=8)] = []
    """Orders by annotation that were carried out or came too late. Each acts once."""
    ignored: Annotated[list[Text], Field(max_length=8)] = []
    """Annotations that name no revision of this rollout."""
    held_seconds: int = 0
    """Seconds so far without a measurement (no canary pod reports, paused, phase Error, no operator), and those that a
    clock jumped. They do not count towards the timeout."""
    held_since: Text = ""
    """Start of the present time without a measurement; empty while the timeout runs."""
    looked_at: Text = ""
    """Last look that the timeout counted up to, about one a minute; empty while it does not run."""
    idle_seconds: int = 0
    """Seconds measured before the first request was counted."""
    restarts_before: Annotated[dict[str, Count], Field(max_length=MOST_RESTARTED_PODS)] = {}
    """Restarts of the serving pods' engines when the attempt began, of the pods with most. Only later ones excuse
    ends of a canary pod."""
    sums: Annotated[list[RolloutSums], Field(max_length=72)] = []
    """Counts so far, which survive restarts of pods and of the operator."""


class RevisionPhase(StrEnum):
    """How far the rollout of a revision is."""

    ROLLING_OUT = "RollingOut"
    NO_PODS = "NoPods"
    """spec.replicas is 0."""
    COMPLETE = "Complete"
    """Every pod runs it, and each was ready at least once."""
    PROVEN = "Proven"
    """Complete, and a pod of it has had every drafter loaded."""


class RevisionStatus(Model):
    """The revision that pods should run."""

    name: Text = ""
    """Name of the revision."""
    phase: Text = ""
    """RollingOut, NoPods, Complete or Proven. Losing a pod later, or scaling, starts no rollout."""
