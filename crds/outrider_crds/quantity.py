"""Kubernetes quantities ("500m", "16Gi", 4), as the API server reads them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import PlainValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

# Kubernetes also takes signs, "n", "u" and "E". None is of use for a pod, and it writes some of them back otherwise.
QUANTITY_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,3})?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|[eE][0-9]{1,2})?$"
_LARGEST = 2**63 - 1
_LARGEST_PLAIN = 10**15 - 1  # as many digits as text may have
_SCALE: dict[str, Fraction] = {"": Fraction(1), "m": Fraction(1, 1000), "k": Fraction(1000)} | {
    unit: Fraction(base) ** power
    for power, prefix in enumerate("KMGTP", start=1)
    for unit, base in ((f"{prefix}i", 1024), (prefix, 1000))
}


def amount(quantity: str | int) -> Fraction:
    """Its exact value, at most 2^63 - 1 as in Kubernetes. Raises ValueError for what is no quantity."""
    if not re.fullmatch(QUANTITY_PATTERN, str(quantity)):
        raise ValueError(f"{quantity!r} is not a quantity; write it like 500m, 2 or 4Gi")
    digits, suffix = re.split(r"(?<=[0-9])(?=[A-Za-z])|$", str(quantity), maxsplit=1)
    scale = Fraction(10) ** int(suffix[1:]) if suffix[:1] in ("e", "E") else _SCALE[suffix]
    return min(Fraction(digits) * scale, Fraction(_LARGEST))


def _checked(value: object) -> str | int:
    if type(value) is int and 0 <= value <= _LARGEST_PLAIN:
        return value
    if isinstance(value, str) and re.fullmatch(QUANTITY_PATTERN, value):
        return value
    raise PydanticCustomError("quantity", "must be a quantity such as 500m, 2 or 4Gi")


Quantity = Annotated[
    str | int,
    PlainValidator(_checked),
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
