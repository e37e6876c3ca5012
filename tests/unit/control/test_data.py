"""The columns that pass between an engine and the core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from outrider_runtime.control.plans import ROOT, DraftPlan, Purpose, chains
from outrider_runtime.control.settings import Drafter, Settings


def test_a_chain_is_a_tree_of_width_one():
    """Each proposal of a request is the parent of the next one."""
    zeros = np.zeros((1, 3), np.int64)
    plan = DraftPlan(np.array([3]), np.ones(1, np.int64), zeros, zeros, Purpose.CHOICE)
    forest = chains(np.array([2, 0, 3]), np.array([0, -1, 0]), plan, plan.drafter_order)
    assert forest.request.tolist() == [0, 0, 2, 2, 2]
    assert forest.depth.tolist() == [1, 2, 1, 2, 3]
    assert forest.rank.tolist() == [0] * 5
    assert forest.parent.tolist() == [ROOT, 0, ROOT, 2, 3]


@pytest.mark.parametrize(
    ("more", "words"),
    [({"max_draft_tokens": -1}, "negative"), ({"slots": 0}, "at least one")],
)
def test_invalid_settings_are_refused_with_the_reason(more, words):
    """An engine learns at its start what is wrong, and where."""
    good: dict[str, Any] = {
        "drafters": (Drafter("eagle", passes=True, needs_hidden=True),),
        "max_draft_tokens": 5,
        "slots": 8,
    }
    Settings(**good)
    with pytest.raises(ValueError, match=words):
        Settings(**(good | more))


def test_two_drafters_of_one_name_are_refused():
    """A pool may hold several models, but their names must differ."""
    two = (Drafter("a", passes=True), Drafter("b", passes=True))
    assert len(Settings(two, 5, 8).drafters) == 2
    with pytest.raises(ValueError, match="share a name"):
        Settings((two[0], two[0]), 5, 8)
