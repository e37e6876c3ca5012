"""The arrivals of a trace, whatever zone its times and the machine are in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from outrider_runtime.simulate.load import TRACE_HEADER, read_trace


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize(
    ("first", "second", "apart_s"),
    [
        ("2024-05-10 00:00:00.0099300+00:00", "2024-05-10 00:00:01+00:00", 0.99007),
        ("2024-05-10 02:00:00+02:00", "2024-05-10 00:00:03Z", 3.0),
        ("2024-03-31 01:59:59", "2024-03-31 03:00:00", 3601.0),
        ("2024-05-10 00:00:00.0000000", "2024-05-10 00:00:02+00:00", 2.0),
    ],
)
def test_trace_arrivals_keep_their_distance_in_any_zone(
    zone: str, first: str, second: str, apart_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets of rows with microseconds were cut off, and the rest was read in the machine's zone."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        file = tmp_path / "trace.csv"
        file.write_text(f"{','.join(TRACE_HEADER)}\n{first},2162,5\n{second},76,15\n")
        at_s, _, _ = read_trace(file)
        assert at_s.tolist() == pytest.approx([0.0, apart_s], abs=1e-5)
    finally:
        monkeypatch.undo()
        time.tzset()
