"""Sums and growth of counters follow from their fields.

A field is a number, a list of numbers, other counters, or any of these by key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import zip_longest
from typing import Annotated, Any, Self, TypeVar, cast

from pydantic import Field

from outrider_crds.base import Model

MOST_COUNTED = 10**18
"""Bound of a sum: below an int64, the API's integer."""
CountersT = TypeVar("CountersT", bound="Counters")
Count = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
Sum = Annotated[float, Field(ge=0, le=MOST_COUNTED, allow_inf_nan=False)]


class Counters(Model):
    """Numbers that only grow. They add up over pods and over processes, each of which counts from 0."""

    def __add__(self, other: Self) -> Self:
        """Add up, to at most `MOST_COUNTED`: the status holds no more. A key that one side lacks is the other's."""
        return _combine(self, other, _sum)

    def __sub__(self, earlier: Self) -> Self:
        """Growth since `earlier`, at least 0. A key that `earlier` lacks is unknown and left out: what was counted for
        it until now may be a whole life."""
        return _combine(self, earlier, _growth)

    def since(self, earlier: Self) -> Self:
        """Growth since `earlier` of sums that were nothing before their first part: a key that it lacks is 0 there."""
        return _combine(self, earlier, _growth_from_nothing)

    @classmethod
    def part_of(cls, whole: Any) -> Self:
        """The counters among the attributes of `whole`."""
        return cast("Self", _zero(cls).model_copy(update={name: getattr(whole, name) for name in cls.model_fields}))


@cache
def _zero(counters: type[Counters]) -> Counters:
    return counters()


def _combine(counted: CountersT, other: CountersT, combine: Callable[[Any, Any], Any]) -> CountersT:
    """Combine field by field. The new model is made as pydantic's own copy is, and shares the set of its fields: sums
    are made for each pod every few seconds, and kept by the thousand."""
    others = other.__dict__
    values = {name: combine(value, others[name]) for name, value in counted.__dict__.items()}
    combined = object.__new__(type(counted))
    shared = {"__pydantic_fields_set__": counted.model_fields_set, "__pydantic_extra__": None}
    for name, value in {"__dict__": values, **shared, "__pydantic_private__": None}.items():
        object.__setattr__(combined, name, value)
    return combined


def _sum(first: Any, other: Any) -> Any:
    if isinstance(first, int | float):
        total = first + other
        return total if total <= MOST_COUNTED else type(total)(MOST_COUNTED)
    if isinstance(first, list):
        # A bucket that did not grow stays the same object: sums over time are kept in memory by the thousand.
        return [count + more if more else count for count, more in zip_longest(first, other, fillvalue=0)]
    if isinstance(first, dict):
        return {**first, **other, **{key: _sum(value, other[key]) for key, value in first.items() if key in other}}
    return _combine(first, other, _sum)


def _growth(last: Any, first: Any) -> Any:
    return _difference(last, first, _growth)


def _growth_from_nothing(last: Any, first: Any) -> Any:
    grown = _difference(last, first, _growth_from_nothing)
    return {**last, **grown} if isinstance(last, dict) else grown


def _difference(last: Any, first: Any, inside: Callable[[Any, Any], Any]) -> Any:
    """`last - first`, at least 0. inside: how parts are compared."""
    if isinstance(last, int | float):
        return last - first if last > first else 0
    if isinstance(last, list):
        return [end - start if end > start else 0 for end, start in zip_longest(last, first, fillvalue=0)]
    if isinstance(last, dict):
        return {key: inside(value, first[key]) for key, value in last.items() if key in first}
    return _combine(last, first, inside)
