"""The figures of one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider_runtime.control.settings import SLOTarget
from outrider_runtime.simulate.books import Finished
from outrider_runtime.simulate.observer import Observer


@dataclass(frozen=True, slots=True)
class ClassFigures:
    name: str
    requests: int
    attained: int

    @property
    def attainment(self) -> float | None:
        return self.attained / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Times in seconds; percentiles over finished requests."""

    policy: str
    requests: int
    refused: int
    """Too long for max_model_len or for the KV cache."""
    output_tokens: int
    steps: int
    ended_s: float
    """When the last request was finished."""
    tokens_per_s: float
    """Goodput: tokens that reached users, over the whole run."""
    latency_mean_s: float
    latency_p50_s: float
    latency_p95_s: float
    ttft_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    mean_batch: float
    mean_verified_length: float
    drafter_shares: Mapping[str, float]
    """Of (request, step) pairs that decoded: how many verified a proposal of each drafter."""
    preemptions: int
    classes: tuple[ClassFigures, ...]
    request_goodput_per_s: float | None
    """Requests per second that met their class; None without classes."""

    @property
    def attainment(self) -> float | None:
        """Over the requests of all classes."""
        requests = sum(one.requests for one in self.classes)
        return sum(one.attained for one in self.classes) / requests if requests else None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def summarise(
    policy: str, finished: Sequence[Finished], refused: int, observer: Observer, ended_s: float,
    targets: Sequence[SLOTarget],
) -> RunFigures:  # fmt: skip
    latency = np.array([one.latency_s for one in finished] or [np.nan])
    tpot = np.array([one.tpot_s for one in finished if one.tpot_s is not None] or [np.nan])
    classes = tuple(_class_figures(target, finished) for target in targets)
    total, tokens = observer.total, sum(one.output_tokens for one in finished)
    return RunFigures(
        policy=policy,
        requests=len(finished),
        refused=refused,
        output_tokens=tokens,
        steps=total.steps,
        ended_s=ended_s,
        tokens_per_s=tokens / ended_s if ended_s else 0.0,
        latency_mean_s=float(latency.mean()),
        latency_p50_s=float(np.percentile(latency, 50)),
        latency_p95_s=float(np.percentile(latency, 95)),
        ttft_mean_s=float(np.mean([one.ttft_s for one in finished] or [np.nan])),
        tpot_p50_s=float(np.percentile(tpot, 50)),
        tpot_p99_s=float(np.percentile(tpot, 99)),
        mean_batch=total.batch,
        mean_verified_length=total.verified_length,
        drafter_shares={name: count / total.decoding for name, count in sorted(observer.drafter_steps.items())},
        preemptions=sum(one.preemptions for one in finished),
        classes=classes,
        request_goodput_per_s=sum(one.attained for one in classes) / ended_s if classes and ended_s else None,
    )


def _class_figures(target: SLOTarget, finished: Sequence[Finished]) -> ClassFigures:
    own = [one for one in finished if one.slo_class == target.name]
    return ClassFigures(target.name, len(own), sum(attains(target, one) for one in own))


def attains(target: SLOTarget, request: Finished) -> bool:
    """A single token has no TPOT to miss."""
    fast_enough = request.tpot_s is None or request.tpot_s <= target.tpot_s
    return fast_enough and (target.ttft_s is None or request.ttft_s <= target.ttft_s)
