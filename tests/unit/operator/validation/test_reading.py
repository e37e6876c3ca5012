"""Reading fields of objects that anyone may have written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_operator.validation.reading import unix_seconds


def test_a_timestamp_is_read_in_its_zone() -> None:
    assert unix_seconds("2026-11-21T12:00:00Z") == unix_seconds("2026-11-21T13:00:00+01:00") == 1795262400


@given(text=st.text(max_size=40) | st.from_regex(r"[0-9]{4,9}-[0-9]{2}-[0-9]{2}T[0-9:+Z.]*", fullmatch=True))
def test_what_is_no_timestamp_is_no_time(text: str) -> None:
    """Conditions of pods and Jobs may be edited: an exception would end all decisions about their service."""
    assert unix_seconds(text) is None or isinstance(unix_seconds(text), float)
