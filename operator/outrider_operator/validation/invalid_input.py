"""Input from outside the operator that does not fit, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InvalidInput:
    """Result of validation in place of a value."""

    source: str
    """Kind of source, from a short list: it labels a metric."""
    reason: str
    """CamelCase reason, from a short list: it labels a metric."""
    detail: str = ""
    """Sentence for people, of bounded length."""
