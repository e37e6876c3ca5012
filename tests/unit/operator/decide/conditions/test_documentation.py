"""docs/conditions.md tells users of every reason."""

from __future__ import annotations

from pathlib import Path

from outrider_crds.status import ConditionType, Reason

PAGE = Path(__file__).parents[5] / "docs" / "conditions.md"


def test_every_condition_and_reason_is_explained() -> None:
    """A reason that a user meets in the status can be looked up."""
    words = set(PAGE.read_text(encoding="utf-8").replace("|", " ").replace("`", " ").replace(",", " ").split())
    assert {str(reason) for reason in Reason} <= words
    assert {str(kind) for kind in ConditionType} <= {word.strip(":") for word in words}
