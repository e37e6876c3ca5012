"""A validation rule in CEL, and helpers that write CEL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider_crds.base import Model
from outrider_crds.names import LABEL_KEY_PATTERN


@dataclass(frozen=True)
class Rule:
    """A rule for every `on` in a resource."""

    on: type[Model]
    field: str
    """Path below `on` that the error points at, for example ".accelerator.count"; empty for `on` itself."""
    cel: str
    """Expression that is true if the rule holds. It sees `on` as `self`, after defaulting, and at a change the former
    one as `oldSelf`."""
    message: str
    """One sentence about what is wrong and what to do."""

    def for_api_server(self) -> dict[str, str]:
        """The entry of `x-kubernetes-validations`."""
        location = {"fieldPath": self.field} if self.field else {}
        return {"rule": self.cel, "message": self.message, **location}


def rules_on(on: type[Model], *rules: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Rules of one model, each as (field, CEL, message)."""
    return tuple(Rule(on, *rule) for rule in rules)


def cel_list(values: Iterable[str]) -> str:
    """`values` as a CEL list of strings."""
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def cel_pattern(pattern: str) -> str:
    """A regular expression as a CEL string."""
    return f"r'{pattern}'"


def label_keys(on: type[Model], field: str) -> Rule:
    """Rule that a map's keys are label keys, since a CustomResourceDefinition has no pattern for keys."""
    return Rule(
        on,
        f".{field}",
        f"!has(self.{field}) || self.{field}.all(k, k.size() <= 253 && k.matches({cel_pattern(LABEL_KEY_PATTERN)}))",
        f"the keys of {field} must be label keys such as team or example.com/team: letters, digits, '-', '_' and "
        "'.', at most 63 after the domain",
    )


def inside(on: type[Model], what: str) -> Rule:
    """Rule for a path without `..`, so that it stays where it says."""
    is_absent = "" if on.model_fields["path"].is_required() else "!has(self.path) || "
    return Rule(
        on,
        ".path",
        f"{is_absent}!self.path.split('/').exists(part, part == '..')",
        f"path must not contain '..': write the folder {what} without it",
    )


def exactly_one(on: type[Model], subject: str, advice: str) -> Rule:
    """Rule for one of the model's fields, which all are optional."""
    fields = [field.alias or name for name, field in on.model_fields.items()]
    return Rule(
        on,
        "",
        f"[{', '.join(f'has(self.{field})' for field in fields)}].exists_one(given, given)",
        f"{subject} must hold exactly one of {', '.join(fields)}: {advice}",
    )


def positive(on: type[Model], field: str) -> Rule:
    """Rule for a duration that is above zero if there is one."""
    return Rule(
        on,
        f".{field}",
        f"!has(self.{field}) || duration(self.{field}) > duration('0s')",
        f"{field} must be above 0: write a duration such as 50ms, 30s or 5m",
    )
