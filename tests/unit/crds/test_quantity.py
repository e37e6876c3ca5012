"""Quantities are compared as Kubernetes compares them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from outrider_crds.quantity import quantity


@pytest.mark.parametrize(
    ("written", "value"),
    [("500000u", Fraction(1, 2)), ("1e-3", Fraction(1, 1000)), ("+2", 2), (0.5, Fraction(1, 2)), ("2E", 2 * 10**18)],
)
def test_what_the_api_server_writes_back_is_read_too(written: str | float, value: Fraction) -> None:
    """It writes the same amount otherwise than a manifest did."""
    assert quantity(written) == value


@pytest.mark.parametrize("written", ["", "+", ".", "4 Gi", None, [], "1e", "x"])
def test_what_is_none_is_no_number(written: object) -> None:
    assert quantity(written) is None
