"""Measured parts of one model's forward pass, interpolated linearly between the points of tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds over one axis: linear between points and beyond the last one, constant below the first one."""

    at: tuple[float, ...]
    """Points of the axis, ascending."""
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.at) != len(self.ms) or not all(low < high for low, high in pairwise(self.at)):
            raise ValueError(f"points {self.at} do not rise, or are not as many as the {len(self.ms)} times")

    def __call__(self, x: float) -> float:
        at, ms = self.at, self.ms
        if x <= at[0] or len(at) == 1:
            return ms[0]
        high = min(bisect_left(at, x), len(at) - 1)
        return ms[high - 1] + (x - at[high - 1]) / (at[high] - at[high - 1]) * (ms[high] - ms[high - 1])


@dataclass(frozen=True, slots=True)
class Surface:
    """Milliseconds over two axes; interpolated between rows like a curve."""

    rows: tuple[float, ...]
    """Points of the first axis, ascending."""
    curves: tuple[Curve, ...]
    """Curve over the second axis, by row."""

    def __call__(self, row: float, column: float) -> float:
        rows, curves = self.rows, self.curves
        if row <= rows[0] or len(rows) == 1:
            return curves[0](column)
        high = min(bisect_left(rows, row), len(rows) - 1)
        low_ms, high_ms = curves[high - 1](column), curves[high](column)
        return low_ms + (row - rows[high - 1]) / (rows[high] - rows[high - 1]) * (high_ms - low_ms)


def curve(at: Sequence[float], ms: Sequence[float]) -> Curve:
    """Make a curve. Raises ValueError for points that do not ascend."""
    return Curve(tuple(map(float, at)), tuple(map(float, ms)))


def surface(rows: Sequence[float], columns: Sequence[float], ms: Sequence[Sequence[float]]) -> Surface:
    """Make a surface. ms: (rows, columns). Raises ValueError for columns that do not ascend."""
    return Surface(tuple(map(float, rows)), tuple(curve(columns, row) for row in ms))


@dataclass(frozen=True, slots=True)
class ModelTables:
    """The parts of one model's forward pass."""

    tokens: Curve
    """Work for each batched token: matrix products, norms, all-reduces. Axis: batched tokens."""
    logits: Curve
    """The output layer. Axis: tokens whose logits are needed."""
    decode_attention: Surface
    """Attention of decoding requests. Axes: requests, mean context."""
    prefill_attention: Surface
    """Attention of a prefill chunk. Axes: chunk, tokens before it."""
    further_token: Surface | None = None
    """Extra time of a further token of each request. Axes: requests, mean context. None: given by `tokens`."""

    def document(self) -> dict[str, Any]:
        """Return the form that a world's file has."""
        further = self.further_token
        return {
            "tokens": curve_document(self.tokens),
            "logits": curve_document(self.logits),
            "decodeAttention": _surface_document(self.decode_attention),
            "prefillAttention": _surface_document(self.prefill_attention),
            **({} if further is None else {"furtherToken": _surface_document(further)}),
        }


def from_document(document: Mapping[str, Any]) -> ModelTables:
    """Raises KeyError for a part that is not there, ValueError for one whose points are out of order."""
    decode, prefill = (document[name] for name in ("decodeAttention", "prefillAttention"))
    further = surface(**document["furtherToken"]) if "furtherToken" in document else None
    return ModelTables(
        curve(**document["tokens"]), curve(**document["logits"]), surface(**decode), surface(**prefill), further
    )


def curve_document(curve: Curve) -> dict[str, list[float]]:
    return {"at": list(curve.at), "ms": _round_ms(curve.ms)}


def _surface_document(surface: Surface) -> dict[str, Any]:
    columns = list(surface.curves[0].at)
    return {"rows": list(surface.rows), "columns": columns, "ms": [_round_ms(row.ms) for row in surface.curves]}


def _round_ms(ms: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in ms]
