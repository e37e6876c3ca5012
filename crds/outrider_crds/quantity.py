"""Parse Kubernetes quantities ("500m", "16Gi", 4) like the API server."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import PlainValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

# Kubernetes also accepts signs, "n", "u" and "E". They are useless for a pod, and it writes some of them differently.
QUANTITY_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,3})?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|[eE][0-9]{1,2})?$"
_LARGEST_PLAIN = 10**15 - 1  # as many digits as text may have
_AS_WRITTEN_BACK = re.compile(r"([+-]?[0-9]{0,24}(?:\.[0-9]{0,24})?)(n|u|m|k|[MGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?")
_SCALE = {unit: Fraction(10) ** power for unit, power in {"": 0, "n": -9, "u": -6, "m": -3, "k": 3}.items()} | {
    unit: Fraction(base) ** power
    for power, prefix in enumerate("KMGTPE", start=1)
    for unit, base in ((f"{prefix}i", 1024), (prefix, 1000))
}


def quantity(value: object) -> Fraction | None:
    """The exact value of a quantity in any form that the API server writes; None if `value` is not one."""
    match = _AS_WRITTEN_BACK.fullmatch(str(value)) if isinstance(value, str | int | float) else None
    if match is None:
        return None
    unit = match[2] or ""
    try:
        return Fraction(match[1]) * (_SCALE[unit] if unit in _SCALE else Fraction(10) ** int(unit[1:]))
    except ValueError:  # a sign or a point alone
        return None


def _check_quantity(value: object) -> str | int:
    if type(value) is int and 0 <= value <= _LARGEST_PLAIN:
        return value
    if isinstance(value, str) and re.fullmatch(QUANTITY_PATTERN, value):
        return value
    raise PydanticCustomError("quantity", "must be a quantity such as 500m, 2 or 4Gi")


Quantity = Annotated[
    str | int,
    PlainValidator(_check_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": 24,
            "minimum": 0,
            "maximum": _LARGEST_PLAIN,
        }
    ),
]
Size = Annotated[str, StringConstraints(min_length=1, max_length=24, pattern=QUANTITY_PATTERN)]
"""A quantity of bytes that a manifest writes as text."""
