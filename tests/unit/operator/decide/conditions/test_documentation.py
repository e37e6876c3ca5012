"""docs/reference/conditions.md tells users of every reason, and of no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider_crds.conditions import ConditionType

from tests.unit.operator.decide.test_properties import REASONS

PAGE = Path(__file__).parents[5] / "docs" / "reference" / "conditions.md"


def test_the_tables_name_every_reason_of_every_condition() -> None:
    """A reason that a user meets in the status can be looked up where its condition is."""
    assert set(_rows()) == {(str(kind), str(reason)) for kind, reasons in REASONS.items() for reason in reasons}


def _rows() -> Iterator[tuple[str, str]]:
    """(condition, reason). A table without the column `condition` is about the one in its heading."""
    named: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").partition("# Alerts")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            named = line.removeprefix("## ").partition(":")[0].split(", ")
        elif line.startswith("| ") and "reason" not in cells:
            kinds, reason = (named, cells[1]) if len(named) == 1 else (cells[0].split(", "), cells[2])
            for kind in named if kinds in (["both"], ["all"]) else kinds:
                for accepted in _accepted() if reason == "a reason of SpecValid" else {reason}:
                    yield kind, accepted


def _accepted() -> set[str]:
    """Why a spec is not applied."""
    return {str(reason) for reason in REASONS[ConditionType.SPEC_VALID]} - {"Accepted"}
