"""When the kubelet sends traffic to a pod, and when it restarts it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider_crds.runtime_state import RuntimeState
from outrider_runtime.server.health import STALE_REPORT_S, STUCK_S, Phase, Vitals, why_not_alive, why_not_ready
from outrider_runtime.server.watch import EngineWatch, ServerView, Sighting, sight

from tests.unit.server.runtime_states import runtime_state

HEALTHY = Vitals(phase=Phase.SERVING, plugin_active=True, report_age_s=0.2)


def _state(written_at: float, steps: int = 0) -> RuntimeState:
    return runtime_state(started_at=0.0, reported_at=written_at, plugin_active=True, steps=steps)


def test_healthy_pod_is_ready_and_alive() -> None:
    """The base that the other cases differ from."""
    assert why_not_ready(HEALTHY) == ""
    assert why_not_alive(HEALTHY) == ""


def test_pod_without_plugin_is_never_ready() -> None:
    """vLLM swallows plugin load errors, so readiness asserts that the plugin is active."""
    assert "has not reported" in why_not_ready(replace(HEALTHY, report_age_s=None))
    assert "not active" in why_not_ready(replace(HEALTHY, plugin_active=False))
    assert why_not_alive(replace(HEALTHY, report_age_s=None)) == ""


def test_pod_whose_plugin_stopped_reporting_is_not_ready() -> None:
    """A controller that hangs would leave requests without speculation, and the state without a writer."""
    assert "last reported 31 s ago" in why_not_ready(replace(HEALTHY, report_age_s=STALE_REPORT_S + 1))


def test_draining_pod_is_alive_but_not_ready() -> None:
    """Endpoints must forget it while it still serves."""
    draining = replace(HEALTHY, phase=Phase.DRAINING)
    assert "draining" in why_not_ready(draining)
    assert why_not_alive(draining) == ""


def test_pod_that_loads_for_long_is_not_restarted() -> None:
    """Start-up has a budget of its own, the startup probe."""
    starting = Vitals(phase=Phase.STARTING, progress_age_s=10 * STUCK_S)
    assert why_not_alive(starting) == ""
    assert "starting" in why_not_ready(starting)


def test_dead_engine_is_restarted() -> None:
    """Only a restart brings it back."""
    assert "died" in why_not_alive(replace(HEALTHY, engine_dead=True))
    assert "died" in why_not_ready(replace(HEALTHY, engine_dead=True))


def test_stuck_engine_is_restarted() -> None:
    """It has requests, and no step has finished for minutes."""
    assert "no step for 181 s" in why_not_alive(replace(HEALTHY, progress_age_s=STUCK_S + 1))
    assert "stuck" in why_not_alive(replace(HEALTHY, loop_age_s=STUCK_S + 1))


def test_busy_engine_is_not_restarted() -> None:
    """Long steps are what a loaded CPU engine does: each one that ends counts as progress."""
    seen = Sighting(state=None, reported_at=None, progressed_at=0.0)
    for minute in range(10):
        seen = sight(seen, _state(written_at=float(minute), steps=minute), unfinished=50, at=60.0 * minute)
    assert seen.progressed_at == 540.0


def test_idle_engine_is_not_restarted() -> None:
    """No requests, no steps: nothing is wrong."""
    seen = sight(Sighting(None, None, 0.0), _state(written_at=1.0, steps=5), unfinished=0, at=1.0)
    assert sight(seen, _state(written_at=2.0, steps=5), unfinished=0, at=900.0).progressed_at == 900.0


def test_engine_without_steps_ages() -> None:
    """What makes `why_not_alive` true in the end."""
    seen = sight(Sighting(None, None, 0.0), _state(written_at=1.0, steps=5), unfinished=1, at=1.0)
    assert sight(seen, _state(written_at=2.0, steps=5), unfinished=1, at=300.0).progressed_at == 1.0


def test_snapshot_that_is_not_replaced_ages() -> None:
    """Its age counts from when it was first seen, whatever the wall clock did since."""
    seen = sight(Sighting(None, None, 0.0), _state(written_at=1.0), unfinished=0, at=1.0)
    assert sight(seen, _state(written_at=1.0), unfinished=0, at=40.0).reported_at == 1.0
    assert sight(seen, _state(written_at=1.3), unfinished=0, at=40.0).reported_at == 40.0


def test_unreadable_snapshot_makes_pod_unready_once_it_is_old() -> None:
    """A snapshot that cannot be read is as good as none: the last one ages."""
    clock = [0.0]
    answers: list[RuntimeState | ValueError] = [_state(written_at=1.0), ValueError("torn")]

    def read() -> RuntimeState:
        answer = answers[0]
        if isinstance(answer, ValueError):
            raise answer
        return answer

    watch = EngineWatch(read, blank=_state(written_at=0.0), clock=lambda: clock[0], wall_clock=lambda: 1000.0)
    watch.follow(lambda: ServerView(phase=Phase.SERVING))
    watch.poll()
    assert watch.state().ready
    del answers[0]
    clock[0] = 5.0
    watch.poll()
    assert watch.state().ready
    clock[0] = STALE_REPORT_S + 1
    watch.poll()
    assert not watch.state().ready
    assert not watch.state().plugin_active


def test_ready_in_the_state_agrees_with_the_probe() -> None:
    """`GET /outrider/state` and `/readyz` are answered from the same vitals."""
    watch = EngineWatch(lambda: None, blank=_state(written_at=0.0), clock=lambda: 0.0, wall_clock=lambda: 7.0)
    watch.follow(lambda: ServerView(phase=Phase.SERVING))
    watch.poll()
    state = watch.state()
    assert not state.ready
    assert not state.plugin_active
    assert state.reported_at == 7.0
    assert why_not_ready(watch.vitals()) != ""


def test_watch_survives_any_error_and_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: an exception of another kind than expected ended the thread without a word, and later the pod."""
    broken = TypeError("a broken report")
    clock, answers = [0.0], list[RuntimeState | Exception]([_state(1.0), broken, broken, _state(2.0)])

    def read() -> RuntimeState:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = EngineWatch(read, blank=_state(written_at=0.0), clock=lambda: clock[0], wall_clock=lambda: 1000.0)
    watch.follow(lambda: ServerView(phase=Phase.SERVING))
    watch.poll()
    clock[0] = STUCK_S + 1
    for _ in range(2):
        watch.poll()
    assert len(caplog.records) == 1
    for reason in (why_not_ready(watch.vitals()), why_not_alive(watch.vitals())):
        assert reason.endswith("its report cannot be read: TypeError: a broken report")
    watch.poll()
    assert why_not_ready(watch.vitals()) == why_not_alive(watch.vitals()) == ""
