"""Kubernetes quantities ("500m", "16Gi", "1e3") as exact numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_QUANTITY = re.compile(r"([+-]?[0-9]{0,24}(?:\.[0-9]{0,24})?)(n|u|m|k|[MGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?")
_SCALE = {unit: Fraction(10) ** power for unit, power in {"n": -9, "u": -6, "m": -3, "k": 3}.items()} | {
    unit: Fraction(base) ** power
    for power, prefix in enumerate("KMGTPE", start=1)
    for unit, base in ((f"{prefix}i", 1024), (prefix, 1000))
}


def quantity(value: Any) -> Fraction | None:
    """`value` as a number; None for what is no quantity."""
    match = _QUANTITY.fullmatch(str(value)) if isinstance(value, str | int | float) else None
    if match is None:
        return None
    try:
        return Fraction(match[1]) * _scale(match[2] or "")
    except ValueError:  # a sign or a point alone
        return None


def _scale(unit: str) -> Fraction:
    if unit in _SCALE:
        return _SCALE[unit]
    return Fraction(10) ** int(unit[1:] or 0)
