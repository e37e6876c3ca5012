"""The judge of loads that change: what its table says, and that each load has requests in all of its phases."""

import pytest

from bench.replay import phases, plan
from bench.virtual_clock.judge import ADAPTIVE, BEST, OURS, PLAIN
from bench.virtual_clock.shifts import HINDSIGHT, JudgedShift, table

TWO_SEEDS = JudgedShift(
    "up and down", [0.25, 0.75], "eagle, k = 2", ["eagle, k = 2", "plain"],
    {
        PLAIN: [[1.0, 1.0], [1.0, 1.0]],
        BEST: [[2.0, 1.0], [2.0, 1.0]],
        HINDSIGHT: [[2.0, 1.0], [2.0, 1.0]],
        OURS: [[2.0, 0.98], [2.0, 0.98]],
    },
)  # fmt: skip


def test_phase_below_plain_decoding_is_named() -> None:
    phase, ratio = TWO_SEEDS.worst_phase(PLAIN)
    assert phase == 2
    assert ratio == pytest.approx(0.98)
    assert "| 0.980 missed (phase 2) |" in table([TWO_SEEDS])[4]


def test_whole_run_weighs_phases_by_their_requests() -> None:
    assert TWO_SEEDS.ratios(BEST) == pytest.approx([0.98**0.75] * 2)
    assert "cannot run" in table([TWO_SEEDS])[4]
    assert ADAPTIVE not in TWO_SEEDS.speeds


@pytest.mark.parametrize("shift", plan.changing_loads(), ids=str)
def test_each_phase_of_a_changing_load_has_requests(shift: phases.Shift) -> None:
    load = phases.load(shift, 0)
    ends_s = shift.ends_s()
    for number, phase in enumerate(shift.phases):
        in_phase = (load.at_s >= ends_s[number] - phase.seconds) & (load.at_s < ends_s[number])
        assert in_phase.sum() >= 8
