"""Kubernetes quantities ("500m", "16Gi") as numbers."""

from __future__ import annotations

import re
from typing import Any

_QUANTITY = re.compile(r"^([0-9.]+)(m|k|[KMGTPE]i?)?$")
_SCALE = {"m": 1e-3, "k": 1e3} | {
    unit: base**power
    for power, prefix in enumerate("KMGTPE", start=1)
    for unit, base in ((f"{prefix}i", 1024.0), (prefix, 1000.0))
}


def quantity(value: Any) -> float | None:
    """A Kubernetes quantity as a number; None for anything else."""
    match = _QUANTITY.match(str(value))
    try:
        return float(match[1]) * _SCALE.get(match[2] or "", 1.0) if match else None
    except ValueError:
        return None
