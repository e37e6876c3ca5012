"""What did not pass the boundary, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unfit:
    """Takes the place of a value that does not fit."""

    source: str
    """Where it came from, one of few words: it labels a metric."""
    reason: str
    """CamelCase, one of few words: it labels a metric."""
    detail: str = ""
    """Sentence for people, bounded."""
