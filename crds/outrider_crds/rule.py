"""A validation rule in its two forms, CEL and Python, and helpers that write CEL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from outrider_crds.base import Model
from outrider_crds.names import LABEL_KEY_PATTERN


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for every `on` in a resource. `cel` sees it as `self`, after defaulting."""

    on: type[Model]
    cel: str
    holds: Callable[[Any], bool]
    """Function of the model that is true if the rule holds."""
    message: str
    """One sentence about what is wrong and what to do."""
    field: str = ""
    """Path below `on` that the error points at, for example ".accelerator.count"."""

    def for_api_server(self) -> dict[str, str]:
        """The entry of `x-kubernetes-validations`."""
        location = {"fieldPath": self.field} if self.field else {}
        return {"rule": self.cel, "message": self.message, **location}


def cel_list(values: Iterable[str]) -> str:
    """`values` as a CEL list of strings."""
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def cel_pattern(pattern: str) -> str:
    """A regular expression as a CEL string."""
    return f"r'{pattern}'"


def label_keys(on: type[Model], field: str, attribute: str) -> Rule:
    """Rule that a map's keys are label keys, since a CustomResourceDefinition has no pattern for keys."""
    longest = 253
    return Rule(
        on=on,
        field=f".{field}",
        cel=(
            f"!has(self.{field}) || self.{field}.all(k, k.size() <= {longest} "
            f"&& k.matches({cel_pattern(LABEL_KEY_PATTERN)}))"
        ),
        holds=lambda m: all(len(k) <= longest and re.fullmatch(LABEL_KEY_PATTERN, k) for k in getattr(m, attribute)),
        message=(
            f"the keys of {field} must be label keys such as team or example.com/team: letters, digits, '-', '_' and "
            "'.', at most 63 after the domain"
        ),
    )
