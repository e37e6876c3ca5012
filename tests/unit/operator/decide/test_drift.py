"""What others add to a list of Outrider's object."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_operator.decide import drift

OURS = [{"name": f"OURS_{number}", "value": "1"} for number in range(40)]
THEIRS = [{"name": f"THEIRS_{number}", "value": "1"} for number in range(500)]


def test_what_others_add_to_a_list_is_not_compared_with_each_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 variables, put before ours by hand, stay for ever: each look took a second."""
    compared = 0
    contains = drift.contains

    def counting(*pair: Any) -> bool:
        nonlocal compared
        compared += 1
        return contains(*pair)

    monkeypatch.setattr(drift, "contains", counting)
    assert counting({"env": [*THEIRS, *OURS]}, {"env": OURS})
    assert compared < len(THEIRS)


@pytest.mark.parametrize("changed", [[], [{"name": "OURS_0", "value": "2"}], [{"name": "OURS_0"}], ["OURS_0", None]])
def test_an_item_of_ours_that_is_gone_or_changed_is_seen(changed: list[Any]) -> None:
    assert not drift.contains({"env": [*THEIRS, *changed]}, {"env": OURS[:1]})
