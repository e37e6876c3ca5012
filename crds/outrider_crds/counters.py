"""Counters: what pods count, declared once.

A counter is a field of a model: its name, its metric, its docstring. Its sum, its growth, its wire form and its series
in Prometheus follow from that. A model holds numbers, lists of numbers, other counters, or any of these by key.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import Field

from outrider_crds.base import Model
from outrider_crds.metrics import Group, Labelled, Metric

MOST_COUNTED = 10**18
"""Bound of a sum: below an int64, the API's integer."""
LEAST_SUM_S = 1e-9
"""Least divisor, in seconds: what is smaller is no quantity."""
Count = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
Sum = Annotated[float, Field(ge=0, le=MOST_COUNTED, allow_inf_nan=False)]


class Counters(Model):
    """Numbers that only grow. They add up over pods and over processes, each of which counts from 0."""

    def __add__(self, other: Self) -> Self:
        """Add up, to at most `MOST_COUNTED`: the status holds no more. A key that one side lacks is the other's."""
        return self._with({name: _sum(value, getattr(other, name)) for name, value in self._items()})

    def __sub__(self, earlier: Self) -> Self:
        """Growth since `earlier`, at least 0. A key that `earlier` lacks is unknown and left out: what was counted for
        it until now may be a whole life."""
        return self._with({name: _growth(value, getattr(earlier, name)) for name, value in self._items()})

    def since(self, earlier: Self) -> Self:
        """Growth since `earlier` of sums that were nothing before their first part: a key that it lacks is 0 there."""
        return self._with({name: _growth(value, getattr(earlier, name), 0) for name, value in self._items()})

    def _items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in type(self).model_fields]

    def _with(self, values: dict[str, Any]) -> Self:
        return cast("Self", type(self).model_construct(**values))


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, Counters):
        return one + other
    if isinstance(one, dict):
        both = {key: _sum(one[key], other[key]) for key in one if key in other}
        return {**one, **other, **both}
    if isinstance(one, list):
        return [first + second for first, second in zip_longest(one, other, fillvalue=0)]
    total = one + other
    return total if total <= MOST_COUNTED else type(total)(MOST_COUNTED)


def _growth(last: Any, first: Any, absent: Any = None) -> Any:
    """`last - first`. absent: what a key counted that `first` lacks; None: unknown."""
    if isinstance(last, Counters):
        return last - first if absent is None else last.since(first)
    if isinstance(last, dict):
        grown = {key: _growth(value, first[key], absent) for key, value in last.items() if key in first}
        return grown if absent is None else {**last, **grown}
    if isinstance(last, list):
        return [max(end - start, 0) for end, start in zip_longest(last, first, fillvalue=0)]
    return max(last - first, 0)


def by_class(_model: Any, counts: dict[str, int]) -> list[Labelled]:
    """Series of a counter by SLO class."""
    return [((slo_class,), count) for slo_class, count in counts.items()]


class ArmCounters(Counters):
    """Sums over the finished requests of one arm of a canary. A request whose client left counts with what it got. A
    request does not count that ran while speculation was off, or while a drafter of either arm could not run."""

    METRICS: ClassVar[Group] = Group(
        "Draft canary",
        "While a pod compares two pools of drafters. All carry the label `arm`: `stable` or `candidate`. They start "
        "from 0 with another attempt. Plain / price is an arm's speed-up. Seconds are weighted so that both arms have "
        "the same mix of batch sizes.",
        label="arm",
    )
    requests: Annotated[Count, Metric("outrider_canary_requests_total")] = 0
    """Finished requests that cost something: that decoded, or whose prompt a drafter read."""
    tokens: Annotated[Count, Metric("outrider_canary_tokens_total")] = 0
    """Output tokens of their decoding steps, bonus tokens included; the token that ends a prompt is not one of them."""
    plain_s: Annotated[Sum, Metric("outrider_canary_plain_seconds_total")] = 0.0
    """Seconds that plain decoding would have taken for these tokens: T_target(N, 0) / N for each token, in the batch of
    its step. By the latency model as corrected online. Plain / price is the arm's speed-up."""
    speculated_s: Annotated[Sum, Metric("outrider_canary_speculated_seconds_total")] = 0.0
    """Plain seconds of the steps in which the request had proposals, or a drafter of its arm ran."""
    price_s: Annotated[Sum, Metric("outrider_canary_price_seconds_total")] = 0.0
    """Seconds of their decoding steps at full batch: (T_target(N, verified) + sum of T_draft(N) over the drafters that
    ran) / N for each request and step, as if all N requests of the step were of this arm. By the latency model as
    corrected online."""
    plain_squared: Sum = 0.0
    """Sum of each request's plain seconds squared."""
    price_squared: Sum = 0.0
    """Sum of each request's price squared, in seconds squared."""
    plain_times_price: Sum = 0.0
    """Sum of each request's plain seconds times its price, in seconds squared."""
    failures: Annotated[Count, Metric("outrider_canary_failures_total")] = 0
    """Times that a drafter was suspended after an error: the one that fails most often, of those in this arm alone."""
    finished: Annotated[
        dict[str, Count], Metric("outrider_canary_finished_total", labels=("slo_class",), series=by_class)
    ] = {}
    """Finished requests with a verdict. Label `slo_class`: the request's class; requests without one are not counted
    here."""
    attained: Annotated[
        dict[str, Count], Metric("outrider_canary_attained_total", labels=("slo_class",), series=by_class)
    ] = {}
    """Requests among them that met the class. Label `slo_class`: the class."""

    @property
    def effective_requests(self) -> float:
        """Requests of equal price that would tell as much as these (Kish's effective size)."""
        squares = self.requests * self.price_squared
        return self.requests * min(1.0, self.price_s**2 / squares) if squares > 0.0 else self.requests

    @property
    def speculated_share(self) -> float:
        """Share of the plain seconds in which the arm speculated."""
        return self.speculated_s / self.plain_s if self.plain_s >= LEAST_SUM_S else 0.0

    @property
    def speedup(self) -> float | None:
        """Seconds of plain decoding / seconds of price; None before any."""
        return self.plain_s / self.price_s if min(self.plain_s, self.price_s) >= LEAST_SUM_S else None
