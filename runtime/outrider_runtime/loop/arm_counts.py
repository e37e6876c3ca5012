"""A draft canary's counters: the arm of each request, and sums over each arm's finished requests.

A request counts once its last step is observed. In asynchronous scheduling that is after its answer. It does not count
if the arms could not be compared for a part of its life.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock

import numpy as np
from outrider_crds.counters import ArmCounters
from outrider_crds.runtime_config import CanaryConfig
from outrider_crds.runtime_state import CanaryState

from outrider_runtime.control.arm_prices import Credits
from outrider_runtime.control.batch import CANDIDATE, NO_ARM, STABLE, Ints

ARM_NAMES = ("stable", "candidate")
"""Names of arms, by arm number."""
STILL_RUNNING = sys.maxsize
"""Stands for the last step of a request that still runs."""
MIN_BLOCK_REQUESTS = 10
"""Requests of a class among which each arm has its exact share. Few, so that a short canary is balanced; enough that
traffic with a period of two or three does not fall into step with the arms."""


def canary_problem(canary: CanaryConfig, pool: Sequence[str]) -> str:
    """Return why a pod with these drafters cannot run the canary, in a sentence; empty if it can."""
    named = [*canary.stable, *canary.candidate]
    unknown = sorted({*named} - {*pool})
    if unknown:
        return (
            f"canary: {', '.join(unknown)} is not among the drafters that this pod was started with ({', '.join(pool)})"
        )
    forgotten = [name for name in pool if name not in named]
    return f"canary: {', '.join(forgotten)} is in neither arm, so no request could ask it" if forgotten else ""


@dataclass(slots=True)
class _Member:
    """A request that is counted. Its price is the sum over its steps, probes excluded."""

    arm: int
    slo_class: str | None
    skipped_tokens: int = 0
    """Tokens of decoding steps that are no evidence about the arms, such as probes."""
    counted_tokens: int = 0
    """Tokens of the other decoding steps, those behind the answer's end included."""
    plain_s: float = 0.0
    """Seconds that plain decoding would have taken for the counted tokens."""
    speculated_s: float = 0.0
    """Those of them that are of steps in which the arm speculated."""
    price_s: float = 0.0
    batches: Counter[int] = field(default_factory=Counter)
    """Counted steps by the batch's size: 0 is a request alone, 1 is 2 to 3, and so on."""
    last_step: int = -1
    """Number of the last step that scheduled it; STILL_RUNNING while it runs, -1 before."""

    def tokens(self, output_tokens: int) -> int:
        """Return how many output tokens the price paid for. The first one comes from the prefill."""
        return max(0, output_tokens - 1 - self.skipped_tokens)

    def used(self, tokens: int) -> float:
        """Return the part of the counted tokens that belongs to the answer, at most 1: what preemption makes a prompt
        of again gives a token that no decoding step counted."""
        return min(1.0, tokens / max(1, self.counted_tokens))


def _evidence(member: _Member, output_tokens: int) -> ArmCounters | None:
    """Return what an ended request adds to its arm; None if its price tells nothing."""
    tokens = member.tokens(output_tokens)
    used, price_s = member.used(tokens), member.price_s
    plain_s = member.plain_s * used
    if not (price_s > 0.0 and math.isfinite(price_s) and math.isfinite(plain_s)):
        return None
    return ArmCounters.model_construct(
        requests=1, tokens=tokens, plain_s=plain_s, speculated_s=member.speculated_s * used, price_s=price_s,
        batch_steps=[member.batches[number] for number in range(max(member.batches, default=-1) + 1)],
        plain_squared=plain_s * plain_s, price_squared=price_s * price_s, plain_times_price=plain_s * price_s,
    )  # fmt: skip


class ArmCounter:
    """Counters since the canary's attempt began in this process."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._lock = RLock()
        """The scheduler's thread counts; the reporter's thread configures and reads consistent sums."""
        self.canary: CanaryConfig | None = None
        self._draws: dict[str | None, list[int]] = {}
        """Arms of the next requests, by SLO class."""
        self._members: dict[str, _Member] = {}
        self._ended: dict[str, int] = {}
        """Output tokens of ended requests that still have an unobserved step, by request."""
        self._sums: list[ArmCounters] = []
        """(2,), by arm number."""
        self._failures: Counter[tuple[int, str]] = Counter()
        """Suspensions after an error, by arm and drafter; drafters that both arms share are not counted."""
        self._observed_before = 0
        """All steps with a smaller number are observed."""

    def configure(self, canary: CanaryConfig | None) -> None:
        """Put a canary in force. Running requests keep their arm; a new attempt starts new counters."""
        with self._lock:
            before, self.canary = self.canary, canary
            if canary is None or before is None or canary.candidate_percent != before.candidate_percent:
                self._draws = {}
            if canary is None or before is None or canary.id != before.id:
                self._members, self._ended, self._failures = {}, {}, Counter()
                self._sums = [ArmCounters(), ArmCounters()]

    def state(self) -> CanaryState | None:
        with self._lock:
            if self.canary is None:
                return None
            stable, candidate = self._sums
            return CanaryState(id=self.canary.id, stable=stable, candidate=candidate)

    # -- requests come and go -----------------------------------------------------------------------------------

    def arrived(self, name: str, slo_class: str | None) -> int:
        """Draw the request's arm, by its class; -1 without a canary."""
        with self._lock:
            if self.canary is None:
                return NO_ARM
            draws = self._draws.setdefault(slo_class, [])
            if not draws:
                draws += self._block(self.canary.candidate_percent)
            arm = draws.pop()
            self._members[name] = _Member(arm, slo_class)
            return arm

    def _block(self, percent: int) -> list[int]:
        """Arms of the next requests in random order; the candidate has exactly its share."""
        smallest = 100 // math.gcd(percent, 100)
        requests = smallest * -(-MIN_BLOCK_REQUESTS // smallest)
        arms = np.where(np.arange(requests) < requests * percent // 100, CANDIDATE, STABLE)
        return [int(arm) for arm in self._rng.permutation(arms)]

    def runs(self, name: str) -> None:
        """Note that the request runs from now on, for the first time or again."""
        member = self._members.get(name)
        if member is not None:
            member.last_step = STILL_RUNNING

    def left(self, name: str, step: int) -> None:
        """Note that the request stopped running, by preemption or for good. step: the last scheduled one."""
        member = self._members.get(name)
        if member is not None:
            member.last_step = step

    def ended(self, name: str, output_tokens: int, *, attained: bool | None) -> None:
        """Note that the request's answer is complete. attained: whether it met its SLO; None without a verdict."""
        with self._lock:
            member = self._members.get(name)
            if member is None:
                return
            if attained is not None and (own := member.slo_class) is not None:
                self._sums[member.arm] += ArmCounters.model_construct(finished={own: 1}, attained={own: int(attained)})
            self._ended[name] = output_tokens
            self.observed(self._observed_before)

    def forget(self, name: str) -> None:
        """Drop a request that ended without evidence, for example by an error of the engine."""
        with self._lock:
            self._members.pop(name, None)
            self._ended.pop(name, None)

    def forget_all(self) -> None:
        """Drop every request that has arrived and is not counted yet: the arms cannot be compared.

        Waiting requests, too: both arms lose the same ones.
        """
        if self._members:
            with self._lock:
                self._members, self._ended = {}, {}

    # -- steps --------------------------------------------------------------------------------------------------

    def add(self, names: Sequence[str], made: Credits) -> None:
        """Count a finished step of these requests."""
        batch = made.size_class - 1
        columns = (made.tokens, made.plain_s, np.where(made.speculates, made.plain_s, 0.0), made.price_s)
        for name, tokens, plain_s, speculated_s, price_s in zip(
            names, *(column.tolist() for column in columns), strict=True
        ):
            member = self._members.get(name)
            if member is None:
                continue
            if made.is_counted:
                member.price_s += price_s
                member.plain_s += plain_s
                member.speculated_s += speculated_s
                member.counted_tokens += tokens
                if tokens:
                    member.batches[batch] += 1
            else:
                member.skipped_tokens += tokens

    def observed(self, before: int) -> None:
        """Count the requests that ended in steps below number `before`, which are all observed."""
        self._observed_before = before
        if not self._ended:
            return
        with self._lock:
            for name in [ended for ended in self._ended if self._members[ended].last_step < before]:
                member, output_tokens = self._members.pop(name), self._ended.pop(name)
                self._sums[member.arm] += _evidence(member, output_tokens) or ArmCounters()

    def failed(self, drafter: str) -> None:
        """Count a drafter's suspension after an error. A drafter that both arms share counts for neither."""
        with self._lock:
            if self.canary is None:
                return
            arms = [arm for arm, names in enumerate(_pools(self.canary)) if drafter in names]
            if len(arms) == 1:
                arm = arms[0]
                self._failures[arm, drafter] += 1
                most = max(count for (number, _), count in self._failures.items() if number == arm)
                self._sums[arm] = self._sums[arm].model_copy(update={"failures": most})


def _pools(canary: CanaryConfig) -> tuple[Sequence[str], Sequence[str]]:
    """Names of each arm's drafters, by arm number."""
    return canary.stable, canary.candidate


def arms_in_words(arms: Ints) -> str:
    """Format how many requests each arm has. arms: (N,), as `Batch.arm`."""
    counts = [(name, int(np.count_nonzero(arms == arm))) for arm, name in enumerate(ARM_NAMES)]
    others = int(np.count_nonzero(arms == NO_ARM))
    return _joined([*((name, count) for name, count in counts if count), *([("no arm", others)] if others else [])])


def _joined(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts)
