"""`draftPool[].paused`: a drafter that stays loaded and proposes nothing, from the next decision on."""

from __future__ import annotations

import numpy as np
from outrider_crds.runtime_config import HotConfig
from outrider_crds.spec import SpeculationMode
from outrider_runtime.loop.control_loop import ControlLoop

from tests.engine.engines import TARGET, block, draft_model, eagle, hot_config, lookup, mtp
from tests.unit.loop.pods import control_loop, stepper
from tests.unit.loop.test_stepper import RUNNING, Engine, blocks

POOL = (eagle(), draft_model(TARGET), lookup())


def static(*paused: str) -> HotConfig:
    """Static proposes with the first drafter that may run."""
    return hot_config(SpeculationMode.STATIC).model_copy(update={"paused_drafters": list(paused) or None})


def proposing(loop: ControlLoop, engine: Engine, hot: HotConfig | None = None, least: int = 0) -> set[str]:
    """Return the drafters that run in the next steps of two requests. least: draft length; 0: a drafter that is fed
    runs, too."""
    if hot is not None:
        loop.configure(hot)
    names, seen = list(loop.numbers), set[str]()
    for _ in range(2):
        engine.add(5, 8)
    while engine.running or engine.waiting:
        engine.step()
        for flight in engine.flights:
            seen |= {names[number] for number in np.flatnonzero(flight.order.passes >= least)}
    return seen


def started(clock: list[float]) -> tuple[ControlLoop, Engine]:
    loop = control_loop(POOL, max_requests=RUNNING, clock=lambda: clock[0])
    return loop, Engine(stepper(loop, block_ids=blocks), 1, np.random.default_rng(0))


def reason(loop: ControlLoop, drafter: str) -> str:
    return loop.state().drafters[drafter].suspended


def test_paused_drafter_is_replaced_by_the_next_one() -> None:
    loop, engine = started([0.0])
    assert proposing(loop, engine, static()) == {"eagle"}
    assert proposing(loop, engine, static("eagle")) == {"draft"}
    assert "draftPool[].paused" in reason(loop, "eagle")
    assert proposing(loop, engine, static("eagle", "draft")) == {"pld"}
    assert proposing(loop, engine, static("eagle", "draft", "pld")) == set()
    assert proposing(loop, engine, static("draft")) == {"eagle"}
    assert not reason(loop, "eagle")


def test_paused_block_drafter_and_mtp_give_way_and_return() -> None:
    """A paused block drafter is not even fed, though it is in every other step."""
    pool = (block(TARGET), mtp(), lookup())
    loop = control_loop(pool, max_requests=RUNNING, clock=lambda: 0.0)
    engine = Engine(stepper(loop, block_ids=blocks), 1, np.random.default_rng(0))
    assert proposing(loop, engine, static(), least=1) == {"flash"}
    assert proposing(loop, engine, static("flash"), least=1) == {"mtp"}
    assert "flash" not in proposing(loop, engine)
    assert proposing(loop, engine, static("flash", "mtp"), least=1) == {"pld"}
    assert proposing(loop, engine, static("mtp"), least=1) == {"flash"}


def test_a_name_that_the_pool_does_not_have_changes_nothing() -> None:
    """A pod of the revision before sees the hot config of the next."""
    loop, engine = started([0.0])
    assert proposing(loop, engine, static("new")) == {"eagle"}


def test_a_pause_outlasts_a_suspension_and_a_suspension_a_pause() -> None:
    clock = [0.0]
    loop, engine = started(clock)
    loop.configure(static("eagle"))
    loop.drafter_failed("eagle", "it fell over")
    assert "it fell over" in reason(loop, "eagle")
    clock[0] = 1e6
    assert proposing(loop, engine) == {"draft"}
    assert "draftPool[].paused" in reason(loop, "eagle")
    loop.drafter_failed("eagle", "it fell over")
    assert proposing(loop, engine, static()) == {"draft"}, "still suspended"
    clock[0] = 2e6
    assert proposing(loop, engine) == {"eagle"}
