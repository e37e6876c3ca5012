"""`status.rollout`: a canary in figures and sentences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from outrider_crds.base import seconds
from outrider_crds.counters import ArmCounters
from outrider_crds.rollout_status import RolloutArm, RolloutProduct, RolloutStatus

from outrider_operator.decide.canary.arms import Arms, arms_by_product
from outrider_operator.decide.canary.draft_canary import CanaryRollout
from outrider_operator.decide.canary.judge import Gain, Judgement
from outrider_operator.decide.canary.machine import judged
from outrider_operator.decide.canary.record import OPEN, CanaryPhase, Cause, keeps_away, measured_s
from outrider_operator.validation.reading import cut

_REASONS: Mapping[str, str] = {
    Cause.WORSE: "Its gain is below rollout.canary.leastGainPercent ({detail}).",
    Cause.SLO_LOWERED: "It attains SLO class {detail} less often, by more than 2 points.",
    Cause.DRAFTER_FAILED: "A drafter of the candidate was suspended twice after an error.",
    Cause.CANDIDATE_CRASHED: "Canary pods ended twice after both pools were loaded, more often than the other pods.",
    Cause.ABORTED_BY_HAND: "It was aborted by the annotation outrider.dev/abort.",
    Cause.TIMEOUT: "There was no verdict within rollout.canary.timeout ({timeout}).",
    Cause.NO_TRAFFIC: "Fewer than {least} requests of each arm finished within rollout.canary.timeout ({timeout}).",
    Cause.RUNTIME_TOO_OLD: "{detail} Update podTemplate.image.",
    Cause.NO_ROOM_FOR_BOTH: "{detail} Make room (a lower engine.maxModelLen, fewer drafters), or promote by hand.",
    Cause.CANNOT_HOST_BOTH: "{detail} Promote by hand, or set rollout.strategy: RollingUpdate.",
    Cause.NO_CAPACITY: "{detail} Add capacity, or promote by hand.",
    Cause.STABLE_NOT_LOADED: "{detail} Mend that drafter, set rollout.onMissingDrafter: Continue, or promote by hand.",
    Cause.IMPOSSIBLE_SUMS: "{detail} They are not judged. Restart the pod or update its runtime, or promote by hand.",
    Cause.NO_HEALTHY_BASELINE: "It was not measured, since no pod that should serve is well: {detail}",
    Cause.OWN_DRAFTERS_UNUSED: "Its own drafters ({detail}) were hardly used: they cost memory and gave nothing.",
}

_MESSAGES: Mapping[str, str] = {
    CanaryPhase.STARTING: "The canary pod of candidate {candidate} starts. {serving}",
    CanaryPhase.MEASURING: "{gain} {left}",
    CanaryPhase.PROMOTING: "Candidate {candidate} rolls out. {reason} {gain}",
    CanaryPhase.SUCCESSFUL: "Candidate {candidate} runs on every pod. {reason} {gain}",
    CanaryPhase.FAILED: "Candidate {candidate} failed. {reason} {gain} {serving} Patch draftPool to try another.",
    CanaryPhase.ERROR: "The canary cannot measure. {reason}",
    CanaryPhase.INCONCLUSIVE: "{reason} {gain} Decide by the annotation outrider.dev/promote={candidate} or "
    "outrider.dev/abort={candidate}.",
    CanaryPhase.SUPERSEDED: "Another draftPool took the place of candidate {candidate}.",
    CanaryPhase.CANCELLED: "The spec left candidate {candidate} before a verdict.",
}
_TRIMMED_SHARE = 0.05
"""Share of steps left out at either end of the sizes."""
_LEAST_COUNTED_S = 30.0
"""Seconds since the first counted request from which on they tell a rate."""


def rollout_status(rollout: CanaryRollout, generation: int, ignored: tuple[str, ...]) -> RolloutStatus | None:
    """The canary's state with figures for people. ignored: annotations that name no revision."""
    canary = rollout.canary
    if canary is None:
        return RolloutStatus(ignored=list(ignored)) if ignored else None
    judgement, products = _judgement(rollout, canary), arms_by_product(canary.sums)
    worst, requests = judgement.gains.get(_worst_product(judgement)), _least_requests(products)
    unmeasured = [name for name in rollout.spec.accelerator.products if name not in products]
    figures = {
        "observed_generation": generation,
        "requests": requests,
        "gain_percent": _percent(worst.value) if worst is not None else "",
        "gain_range": _range_text(worst) if worst is not None else "",
        "summary": _summary(canary, requests, worst),
        "arms": _arms(products),
        "products": [_product(name, arms, judgement.gains.get(name)) for name, arms in sorted(products.items())]
        + [RolloutProduct(product=name) for name in unmeasured],
        "message": message_of(rollout, canary),
        "ignored": list(ignored),
    }
    return canary.model_copy(update=figures)


def message_of(rollout: CanaryRollout, canary: RolloutStatus) -> str:
    """A sentence about the result, or about the remaining time."""
    judgement, hold = _judgement(rollout, canary), rollout.view.hold
    worst, products = _worst_product(judgement), arms_by_product(canary.sums)
    sizes = _batch_sizes(products.get(worst, Arms()), rollout.spec.engine.max_num_seqs)
    gain = _gain_text(judgement.gains.get(worst), sizes)
    if hold and canary.held_since and canary.phase in OPEN:
        return cut(f"{hold} The canary waits, and its timeout does not run. {gain}".strip(), 2048)
    sentence = _MESSAGES.get(canary.phase, "A newer release of Outrider decides about this rollout.")
    if canary.cause == Cause.STRATEGY_CHANGED:
        sentence = "rollout.strategy is no longer DraftCanary: candidate {candidate} rolls out without a verdict."
    image = "" if rollout.spec.pod_template.image else rollout.desired.images.waiting
    if image and keeps_away(canary):
        sentence += f" The upgrade to runtime {image} waits until the candidate is promoted or gone."
    left = _time_left(rollout, canary, judgement) if canary.phase == CanaryPhase.MEASURING else ""
    fields = {"candidate": canary.candidate, "stable": canary.stable, "serving": _serving(rollout)}
    filled = sentence.format(reason=_reason(rollout, canary), gain=gain, left=left, **fields)
    return cut(" ".join(filled.split()), 2048)


def _serving(rollout: CanaryRollout) -> str:
    if rollout.world.pods.ready:
        return "The other pods serve on."
    is_answering = bool(rollout.world.canary_pods.ready)
    return "No other pod is ready: the canary pod answers until one is." if is_answering else "No pod is ready."


def _reason(rollout: CanaryRollout, canary: RolloutStatus) -> str:
    settings, sentence = rollout.view.settings, _REASONS.get(canary.cause, "{detail}")
    return sentence.format(detail=canary.detail, timeout=settings.timeout, least=settings.min_requests)


def _judgement(rollout: CanaryRollout, canary: RolloutStatus) -> Judgement:
    """The one that decided now; after the verdict, one of all that was counted."""
    return rollout.decided.judgement or judged(rollout.view.settings, arms_by_product(canary.sums))


def _worst_product(judgement: Judgement) -> str:
    """The product where the candidate gains least; empty before any has a gain."""
    values = {name: gain.value for name, gain in judgement.gains.items() if gain is not None}
    return min(values, key=values.__getitem__, default="")


def _least_requests(products: Mapping[str, Arms]) -> int:
    return round(min((arms.least_requests for arms in products.values()), default=0.0))


def _time_left(rollout: CanaryRollout, canary: RolloutStatus, judgement: Judgement) -> str:
    """How much longer it takes, at the rate since the first counted request."""
    requests, measured = _least_requests(arms_by_product(canary.sums)), measured_s(canary, rollout.world.at)
    start, counted_s = f"{requests} requests of each arm.", measured - canary.idle_seconds
    if not requests:
        return f"{start} No traffic reaches both arms yet."
    if not judgement.speculates:
        return f"{start} Neither pool speculates at this load, so nothing tells which one is better."
    if judgement.requests_left is None:
        return f"{start} The gain is too near the line to say how many more it takes."
    if counted_s < _LEAST_COUNTED_S:
        return f"{start} It is too early to say how many more it takes."
    rate = 60.0 * requests / counted_s
    start += f" At this traffic ({_two_digits(rate)} requests of each arm a minute)"
    minutes = judgement.requests_left / rate
    if 60.0 * minutes > seconds(rollout.view.settings.timeout) - measured:
        return f"{start} it takes longer than the timeout leaves."
    return f"{start} about {duration(minutes)} more."


def _two_digits(number: float) -> str:
    """Noise of a rate must not write a status: 1234 -> "1200"."""
    return f"{float(f'{number:.2g}'):.10g}"


def duration(minutes: float) -> str:
    if minutes < 1.5:
        return "a minute"
    return f"{minutes:.0f} minutes" if minutes < 120.0 else f"{minutes / 60.0:.0f} hours"


def _gain_text(gain: Gain | None, batch_sizes: str) -> str:
    if gain is None:
        return ""
    where = f", in batches of {batch_sizes}" if batch_sizes else ""
    return f"Gain {_percent(gain.value)}% [{_range_text(gain)}]{where}."


def _batch_sizes(arms: Arms, most_requests: int | None) -> str:
    """Batch sizes of the middle 90% of both arms' steps, "1 to 7": the gain at others is not known. most_requests: the
    engine's bound of a batch, if the spec names it; one below the last size was set after the measurement."""
    steps = (arms.stable + arms.candidate).batch_steps
    if not any(steps):
        return ""
    cumulative = list(accumulate(steps))
    shares = (_TRIMMED_SHARE, 1.0 - _TRIMMED_SHARE)
    first, last = (bisect_left(cumulative, share * cumulative[-1]) for share in shares)
    least, most = 2**first, 2 ** (last + 1) - 1
    if most_requests is not None and most_requests >= 2**last:
        most = min(most, most_requests)
    return f"{least} to {most}" if most > least else str(least)


def _percent(share: float) -> str:
    return f"{100.0 * share:+.1f}"


def _range_text(gain: Gain) -> str:
    return f"{_percent(gain.low)} to {_percent(gain.high)}"


def _summary(canary: RolloutStatus, requests: int, gain: Gain | None) -> str:
    """The printer column: "Measuring 812 +4.1% [0.6,7.5]"."""
    figures = f" {requests}" if requests else ""
    if requests and gain is not None:
        figures += f" {_percent(gain.value)}% [{100.0 * gain.low:.1f},{100.0 * gain.high:.1f}]"
    return cut(f"{canary.phase}{figures}")


def _arms(products: Mapping[str, Arms]) -> list[RolloutArm]:
    total = sum(products.values(), Arms())
    return [_arm("stable", total.stable), _arm("candidate", total.candidate)]


def _arm(name: str, sums: ArmCounters) -> RolloutArm:
    finished, attained = sum(sums.finished.values()), sum(sums.attained.values())
    return RolloutArm(
        name=name,
        requests=round(sums.requests),
        speedup=f"{sums.speedup:.4g}" if sums.speedup is not None else "",
        attainment_percent=f"{100.0 * attained / finished:.1f}" if finished else "",
        failures=round(sums.failures),
    )


def _product(name: str, arms: Arms, gain: Gain | None) -> RolloutProduct:
    return RolloutProduct(
        product=cut(name),
        requests=round(arms.least_requests),
        gain_percent=_percent(gain.value) if gain is not None else "",
        gain_range=_range_text(gain) if gain is not None else "",
        measured=True,
    )
