"""What the operator sends in a server-side apply."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st
from outrider_operator.cluster.kubernetes_api import yaml_text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_of_a_user_arrives_as_it_was_written(text: str) -> None:
    """The API server reads YAML, which has no surrogate pairs: an annotation with an emoji could not be applied."""
    document = {"metadata": {"annotations": {"note": text}}}
    assert yaml.safe_load(yaml_text(document)) == document
