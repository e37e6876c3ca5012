"""Quantities are compared as Kubernetes compares them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from outrider_crds.quantity import amount


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
