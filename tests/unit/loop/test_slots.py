"""Slots: two requests never share one, and a step that is under way keeps those of its requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_runtime.loop.slots import Slots

RUNNING = 4
COMES, GOES, STEP, OVER = range(4)


@given(st.lists(st.tuples(st.integers(COMES, OVER), st.integers(0, 9)), max_size=80))
def test_no_two_requests_share_a_slot_and_none_is_lost(events: list[tuple[int, int]]) -> None:
    slots, live, step, over = Slots(2 * RUNNING), dict[str, int](), 0, 0
    for serial, (event, which) in enumerate(events):
        if event == COMES and len(live) < RUNNING:
            live[f"r{serial}"] = slots.take(f"r{serial}")
        elif event == GOES and live:
            name = sorted(live)[which % len(live)]
            del live[name]
            slots.leave(name, step)
        elif event == STEP:
            step += 1
        elif event == OVER:
            over = min(step, over + 1)
            slots.over(over + 1)
        assert len(set(live.values())) == len(live)
        assert slots.of(sorted(live)).tolist() == [live[name] for name in sorted(live)]
    for name in live:
        slots.leave(name, step)
    slots.over(step + 1)
    assert sorted(slots.take(f"new{number}") for number in range(2 * RUNNING)) == list(range(2 * RUNNING))


def test_a_slot_waits_for_the_last_step_of_its_request() -> None:
    """Bug: what came of a step would count for the request that has the slot now."""
    slots = Slots(2)
    first = slots.take("a")
    slots.leave("a", last_step=7)
    assert slots.over(7) == []
    assert slots.take("b") != first
    assert slots.over(8) == [first]
    assert slots.early == []


def test_oldest_released_slot_is_reused_early_if_none_is_free() -> None:
    slots = Slots(2)
    first, second = slots.take("a"), slots.take("b")
    slots.leave("a", last_step=1)
    slots.leave("b", last_step=1)
    assert slots.take("c") == first
    assert slots.early == [first]
    assert slots.over(2) == [second]
