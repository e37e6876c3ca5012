"""Which settings a measurement belongs to."""

from __future__ import annotations

from typing import Any

import pytest
from outrider_crds.profile import profile_keys
from outrider_crds.spec import SpeculativeServiceSpec


def keys(image: str = "i", **fields: Any) -> tuple[str, str]:
    pool = [{"name": "lookup", "method": "PromptLookup", "promptLookup": {}}]
    document = {"target": {"name": "org/model"}, "accelerator": {"products": ["cpu"]}, "draftPool": pool, **fields}
    found = profile_keys(SpeculativeServiceSpec.model_validate(document), "cpu", image)
    return found.target, found.drafters["lookup"]


def test_a_key_is_that_of_earlier_releases() -> None:
    """As release 0.1 computed it: an operator that is upgraded measures nothing again."""
    assert keys() == ("c3e70c5ed9", "385074408f")


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": {"backend": "Torch"}}, {"engine": {"dtype": "float32"}}, {"engine": {"maxModelLen": 64}},
        {"image": "j"}, {"target": {"name": "org/other"}},
    ],
)  # fmt: skip
def test_what_moves_a_steps_time_has_a_profile_of_its_own(fields: dict[str, Any]) -> None:
    """The engine is one of them."""
    assert set(keys()).isdisjoint(keys(**fields))


def test_what_does_not_shares_one() -> None:
    renamed = [{"name": "lookup", "method": "PromptLookup", "promptLookup": {}, "paused": True}]
    assert keys(replicas=3, draftPool=renamed, engine={"backend": "vLLM"}) == keys()
