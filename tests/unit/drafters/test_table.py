"""The table of methods: what the API may name is in it, and the controller knows it by its traits alone."""

from __future__ import annotations

import pytest
from outrider_crds.draft_pool import DraftMethod
from outrider_runtime.drafters import METHODS, traits

from tests.engine.engines import TARGET, draft_model, eagle, lookup


@pytest.mark.parametrize("method", DraftMethod)
def test_every_method_of_the_api_is_in_the_table(method: DraftMethod) -> None:
    """Bug: a manifest that the API takes, and a pod that ends on it."""
    method_traits = METHODS[method]
    both = method_traits.needs_kv and method_traits.needs_hidden
    assert both == (method is DraftMethod.BLOCK), "a cache is fed later, or never; a block drafter's in every step"


def test_a_drafter_is_known_by_what_it_needs() -> None:
    assert not traits(lookup("pld")).reads
    assert traits(draft_model(TARGET, "draft")).needs_kv
    assert traits(eagle(name="head")).needs_hidden
    assert traits(eagle(name="head")).name == "head"
