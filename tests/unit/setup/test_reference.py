"""The generated pages of docs/reference."""

from __future__ import annotations

import pytest

from setup import reference

VALUES = """
# -- The pod.
operator:
  # -- Tag; the version
  # when empty.
  tag: ""
  resources:
    limits: {memory: 1Gi}

# -- Namespaces.
watchNamespaces: []
"""


def test_chart_values_are_leaves_with_the_comment_above() -> None:
    assert reference.chart_values(VALUES) == [
        reference.Value("operator", "", "The pod."),
        reference.Value("operator.tag", '""', "Tag; the version when empty."),
        reference.Value("operator.resources.limits", "{memory: 1Gi}", ""),
        reference.Value("watchNamespaces", "[]", "Namespaces."),
    ]


def test_chart_values_line_that_is_no_key_is_refused() -> None:
    """Text of a block scalar that looks like a key would become a value that the chart does not have."""
    with pytest.raises(ValueError, match=r"a\.b was read"):
        reference.chart_values("a: |\n  b: c\n")


def test_command_line_page_has_every_option_and_no_home_folder() -> None:
    page = reference.cli_page()
    for option in ("--drain-timeout", "--time-budget", "--acceptance"):
        assert f"`{option}" in page
    assert "~/.cache/outrider/models" in page


def test_pages_of_the_repository_are_up_to_date() -> None:
    assert reference.main(["--check"]) == 0
