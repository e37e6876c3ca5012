"""When a refused write is tried again."""

from __future__ import annotations

from outrider_operator.cluster_model import ApiRefusal
from outrider_operator.controller.reconcile import FIRST_PAUSE_S, LONGEST_PAUSE_S, RefusalBackoff

FIRST, OTHER = (ApiRefusal("ConfigMap", name, "serving", "quota", write=name) for name in ("one", "other"))


def test_a_refused_write_waits_longer_each_time() -> None:
    """Neither a tight loop against the API server nor an hour after the quota was raised."""
    refusals, at, pauses = RefusalBackoff(1), 0.0, []
    for _ in range(8):
        refusals.note([FIRST], at)
        assert refusals.in_force(at) == (FIRST,)
        pause = refusals.due_in_s(at)
        assert pause is not None
        pauses.append(pause)
        at += pause
        assert refusals.in_force(at) == ()
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S


def test_a_refusal_stays_in_force_while_others_are_tried() -> None:
    """One that is not due was not tried: that nothing is said of it does not mean that it was accepted."""
    refusals = RefusalBackoff(1)
    refusals.note([FIRST], 0.0)
    refusals.note([OTHER], 1.0)
    assert refusals.in_force(1.0) == (FIRST, OTHER)
    refusals.note([], 2.5)
    assert refusals.in_force(2.5) == (OTHER,)
    assert refusals.due_in_s(2.5) == 0.5


def test_what_is_accepted_at_last_is_forgotten() -> None:
    refusals = RefusalBackoff(1)
    refusals.note([FIRST], 0.0)
    refusals.note([], 3.0)
    assert refusals.due_in_s(3.0) is None
    refusals.note([FIRST], 4.0)
    assert refusals.due_in_s(4.0) == FIRST_PAUSE_S
