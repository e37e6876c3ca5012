"""Quantities are compared as Kubernetes compares them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from outrider_crds.quantity import amount, quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (2, 2),
        ("500m", Fraction(1, 2)),
        ("1.5Gi", 3 * 2**29),
        ("2e3", 2000),
        ("1E2", 100),
        ("3k", 3000),
        ("999999999999999Pi", 2**63 - 1),
    ],
)
def test_an_amount_is_exact_and_capped_as_in_kubernetes(text: str | int, value: Fraction) -> None:
    """`requests <= limits` must not fail for a rounding, nor differ from the API server far out."""
    assert amount(text) == value


@pytest.mark.parametrize("text", ["4 Gi", "-1", "1n", "5u", "1E", "", "Gi", "1.2345", "0x10", "1\n"])
def test_what_is_no_quantity_is_named(text: str) -> None:
    """Units that Kubernetes rewrites on storage would be applied again at every reconcile."""
    with pytest.raises(ValueError, match="is not a quantity"):
        amount(text)


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
