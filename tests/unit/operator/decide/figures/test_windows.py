"""Figures: sums over pods and windows that survive restarts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.counters import TPOT_BUCKETS_S, AdapterCounters, HistogramState, SpeedupCounters
from outrider_crds.runtime_state import AdapterState, DrafterReport, RuntimeState, ServiceCounters, SLOClassState
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_operator.decide.figures import windows
from outrider_operator.decide.figures.samples import percentile_s, three_digits, time_text
from outrider_operator.decide.figures.status_figures import slo_classes
from outrider_operator.figure_windows import FigureWindows

from tests.unit.operator.decide.world import START, World, manifest

WINDOW_S = 60.0
NAMES = windows.names_of(manifest())
"""Drafter "pld" and class "chat"."""


def state(tokens: int = 0, *, started_at: float = START, **fields: Any) -> RuntimeState:
    return RuntimeState(
        service="chat",
        namespace="default",
        revision="r",
        config_hash="h",
        started_at=started_at,
        reported_at=START,
        ready=True,
        plugin_active=True,
        output_tokens=tokens,
        **fields,
    )


def watched(steps: list[dict[str, RuntimeState]], every_s: float = 10.0) -> tuple[windows.History, float]:
    """A history of snapshots `every_s` apart, and the time of the last."""
    history, at = windows.History(), START
    for step, states in enumerate(steps):
        at = START + step * every_s
        history = windows.record(history, states, NAMES, len(states), at, WINDOW_S)
    return history, at


def tokens_in_window(steps: list[dict[str, RuntimeState]]) -> float | None:
    history, at = watched(steps)
    current = windows.windows(history, at, WINDOW_S).current
    return current.gained.output_tokens if current is not None else None


def test_goodput_is_summed_over_pods() -> None:
    """Two pods at 10 and 20 tokens a snapshot, six snapshots in the window."""
    assert tokens_in_window([{"a": state(10 * i), "b": state(20 * i)} for i in range(10)]) == 180


def test_a_look_that_is_taken_in_parts_is_one_look() -> None:
    """The pods of a large service are counted in batches, which does not affect the figures."""
    whole = parts = windows.History()
    for step in range(10):
        at = START + step * 10
        states = {name: state(number * step) for number, name in enumerate("abcde")}
        whole = windows.record(whole, states, NAMES, 5, at, WINDOW_S)
        for names in ("ab", "cd", "e"):
            parts = windows.record(parts, {name: states[name] for name in names}, NAMES, 5, at, WINDOW_S)
    assert parts == whole
    assert windows.windows(parts, at, WINDOW_S) == windows.windows(whole, at, WINDOW_S)


def test_a_restarted_pod_loses_nothing_and_counts_nothing_twice() -> None:
    """A process that starts again counts from 0; what it had counted before stays in the sum."""
    before = [{"a": state(1000 + 10 * i)} for i in range(5)]
    after = [{"a": state(10 * i, started_at=START + 41)} for i in range(1, 6)]
    assert tokens_in_window(before + after) == 60


def test_a_pod_that_misses_a_look_is_counted_at_the_next() -> None:
    """A slow answer is no loss."""
    steps = [{"a": state(10 * i)} for i in range(10)]
    steps[5] = {}
    assert tokens_in_window(steps) == 60


def test_an_operator_that_starts_late_does_not_count_the_past() -> None:
    """A pod's counters since yesterday are not this minute's goodput."""
    assert tokens_in_window([{"a": state(1_000_000 + 10 * i, started_at=START - 86400)} for i in range(10)]) == 60


def test_pod_that_starts_during_the_window_counts_all_tokens() -> None:
    """A new process's first tokens fall between two snapshots."""
    steps: list[dict[str, RuntimeState]] = [{} for _ in range(5)]
    steps += [{"b": state(7 * i, started_at=START + 45)} for i in range(1, 6)]
    assert tokens_in_window(steps) == 35


def test_there_are_no_figures_before_a_whole_window() -> None:
    """Half a window would be noise."""
    history, at = watched([{"a": state(10 * i)} for i in range(4)])
    assert windows.windows(history, at, WINDOW_S) == FigureWindows()


def test_the_window_before_is_its_own() -> None:
    """Two windows, each with its own sum: what hysteresis stands on."""
    steps = [{"a": state(10 * min(i, 6) + 100 * max(0, i - 6))} for i in range(13)]
    history, at = watched(steps)
    result = windows.windows(history, at, WINDOW_S)
    assert result.current is not None
    assert result.previous is not None
    assert (result.previous.gained.output_tokens, result.current.gained.output_tokens) == (60, 600)


def test_a_history_does_not_grow_and_forgets_pods_that_are_gone() -> None:
    """50 services for weeks in 150 MB."""
    history = windows.History()
    for i in range(500):
        history = windows.record(history, {f"pod-{i // 50}": state(i)}, NAMES, 1, START + 5 * i, WINDOW_S)
        history = windows.forget(history, {f"pod-{i // 50}"})
    assert len(history.snapshots) < 80
    assert len(history.pods) == 1


def counting(name: str, count: int) -> dict[str, RuntimeState]:
    """One pod, of whose drafter and class `name` so much is counted."""
    empty = HistogramState(counts=[])
    drafter = DrafterReport(name=name, loaded=True, tried=count)
    slo = SLOClassState(name=name, finished=count, tpot=empty, ttft=empty)
    return {"a": state(1, drafters=[drafter], slo_classes=[slo])}


def test_names_that_a_pod_makes_up_are_not_kept() -> None:
    """A pod that named 1350 new drafters at each poll took 700 MB of the operator's memory in 15 minutes."""
    history = windows.History()
    for i in range(50):
        history = windows.record(history, counting(f"made-up-{i}", i), NAMES, 1, START + 5 * i, WINDOW_S)
    for kept in (history.snapshots[-1].totals, history.pods["a"][1]):
        assert kept == ServiceCounters(output_tokens=1)


def test_a_name_that_returns_to_the_spec_starts_from_zero() -> None:
    """What was counted before it went counts neither as gained nor as lost when it comes back."""
    other, history = windows.names_of(manifest(sloClasses=[{"name": "other", "tpot": "50ms"}])), windows.History()
    for i in range(20):
        names = other if 8 <= i < 12 else NAMES
        history = windows.record(history, counting("chat", 10 * i), names, 1, START + 10 * i, WINDOW_S)
        has_it = any("chat" in snapshot.totals.slo_classes for snapshot in history.snapshots)
        assert has_it == (names is NAMES and i != 12)
    current = windows.windows(history, START + 190, WINDOW_S).current
    assert current is not None
    assert current.gained.slo_classes["chat"].finished == 60


def test_class_that_returns_counts_from_its_return() -> None:
    """Bug: a class that left the spec and returned counted its whole life as one step: 5,205 requests for 5."""
    history = windows.History()
    for i in range(20):
        states = {"a": state(1)} if 5 <= i < 8 else counting("chat", 5000 + i)
        history = windows.record(history, states, NAMES, 1, START + 10 * i, WINDOW_S)
        current = windows.windows(history, START + 10 * i, WINDOW_S).current
        gained = current.gained.slo_classes.get("chat") if current is not None else None
        assert gained is None or gained.finished <= 6
    assert gained is not None
    assert gained.finished == 6


def test_tokens_per_step_come_from_the_long_window_alone() -> None:
    """Bug: after some minutes all pairs since the operator's start were in them, so that no speed-up was left."""
    history = windows.History()
    for i in range(100):
        draft = DrafterReport(name="pld", loaded=True, tried=100 * i, accepted=80 * i, request_steps=100 * i)
        history = windows.record(
            history, {"a": state(180 * i, drafters=[draft], draft_length_steps=[0, 100 * i])}, NAMES, 1,
            START + 10 * i, WINDOW_S,
        )  # fmt: skip
    current = windows.windows(history, START + 990, WINDOW_S).current
    assert current is not None
    assert current.rare.tokens_per_step == 1.8


def test_a_service_of_any_shape_has_names() -> None:
    """Another release's CRD may have let it in."""
    for service in ({"spec": {"draftPool": [{"name": ["x"]}, "y", {}], "sloClasses": 3}}, None):
        assert not any(windows.names_of(service).values())


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.booleans()), min_size=14, max_size=40))
@pytest.mark.slow
def test_no_restart_or_silence_makes_tokens_up(steps: list[tuple[bool, int, bool]]) -> None:
    """Whatever a pod does, the sum never exceeds what it produced and misses only what no report showed."""
    history, process, count, produced, unseen = windows.History(), START, 0, 0, 0
    for step, (restarts, gained, answers) in enumerate(steps):
        at = START + 10.0 * step
        if restarts and step:
            unseen += count - seen_of(history, process)
            process, count = at - 1, 0
        count, produced = count + gained, produced + gained
        states = {"a": state(count, started_at=process)} if answers else {}
        history = windows.record(history, states, NAMES, 1, at, WINDOW_S)
    total = history.snapshots[-1].totals.output_tokens
    assert produced - unseen - (count - seen_of(history, process)) == total


def seen_of(history: windows.History, process: float) -> int:
    """What that process of the pod had counted when it last answered."""
    result = history.pods.get("a")
    return result[1].output_tokens if result is not None and result[0] == process else 0


def test_percentiles_come_from_merged_histograms() -> None:
    """Counts of pods are added before the quantile is taken, not the quantiles averaged."""
    fast, slow = [0] * (len(TPOT_BUCKETS_S) + 1), [0] * (len(TPOT_BUCKETS_S) + 1)
    fast[5], slow[17] = 99, 1

    def chat(counts: list[int], scale: int) -> SLOClassState:
        tpot = HistogramState(counts=[scale * count for count in counts])
        return SLOClassState(
            name="chat", finished=sum(tpot.counts), attained=0, tpot=tpot, ttft=HistogramState(counts=[])
        )

    steps = [{"a": state(slo_classes=[chat(fast, i)]), "b": state(slo_classes=[chat(slow, i)])} for i in range(9)]
    history, at = watched(steps)
    figures = windows.windows(history, at, WINDOW_S).current
    assert figures is not None
    counts = figures.gained.slo_classes["chat"].tpot.counts
    assert sum(counts) == 600
    assert TPOT_BUCKETS_S[4] <= (percentile_s(counts, TPOT_BUCKETS_S, 0.5) or 0) <= TPOT_BUCKETS_S[5]
    assert (percentile_s(counts, TPOT_BUCKETS_S, 0.999) or 0) > TPOT_BUCKETS_S[15]


def test_requests_that_clients_aborted_are_counted_apart() -> None:
    """A class whose clients all leave in time has no attainment, and still shows why."""
    empty = HistogramState(counts=[])

    def pods(i: int) -> dict[str, RuntimeState]:
        slo = SLOClassState(name="chat", finished=0, attained=0, aborted=10 * i, tpot=empty, ttft=empty)
        return {"a": state(slo_classes=[slo]), "b": state(slo_classes=[slo])}

    history, at = watched([pods(i) for i in range(9)])
    figures = windows.windows(history, at, WINDOW_S).current
    spec = SpeculativeServiceSpec.model_validate(manifest(sloClasses=[{"name": "chat", "tpot": "50ms"}])["spec"])
    (slo_class,) = slo_classes(spec, figures)
    assert (slo_class.requests, slo_class.attainment_percent) == (0, "")
    assert slo_class.aborted == 120


def test_acceptance_is_accepted_over_tried_summed() -> None:
    """Not the mean of the pods' rates: a busy pod weighs more."""
    drafters = [
        [{"tried": 90, "accepted": 81, "request_steps": 30}, {"tried": 10, "accepted": 1, "request_steps": 10}]
    ][0]

    def of(index: int, i: int) -> RuntimeState:
        scaled = {name: value * i for name, value in drafters[index].items()}
        draft = DrafterReport(name="pld", loaded=True, **scaled)
        return state(1000 * i, drafters=[draft], draft_length_steps=[10 * i, 40 * i])

    history, at = watched([{"a": of(0, i), "b": of(1, i)} for i in range(9)])
    world = World(manifest()).served()
    world.figures = windows.windows(history, at, WINDOW_S)
    plan = world.reconcile()
    assert plan.status.summary is not None
    assert plan.status.summary.acceptance == "82%"
    assert plan.status.drafts[0].acceptance_rate == "0.82"
    assert plan.status.drafts[0].accepted_length == "3.05"
    assert plan.status.drafts[0].share_percent == "40"


def test_a_draft_that_is_seldom_tried_still_shows_its_acceptance() -> None:
    """One that does not pay is explored now and then; a window without a trial does not make it unknown."""
    tried_once = DrafterReport(name="pld", loaded=True, tried=20, accepted=5, request_steps=10)
    untried = DrafterReport(name="pld", loaded=True)
    first = {"a": state(0, drafters=[untried])}
    history, at = watched([first, *({"a": state(1000 * i, drafters=[tried_once])} for i in range(1, 13))])
    world = World(manifest()).served()
    world.figures = windows.windows(history, at, WINDOW_S)
    (draft,) = world.reconcile().status.drafts
    assert (draft.acceptance_rate, draft.accepted_length, draft.share_percent) == ("0.25", "1.5", "0")


def test_three_significant_digits() -> None:
    """Figures as printed; noise below that writes nothing."""
    assert [three_digits(v) for v in (1234.5, 12.345, 0.12345, 0, 999.6)] == ["1230", "12.3", "0.123", "0", "1000"]
    assert [time_text(v) for v in (0.0312, 1.5)] == ["31.2ms", "1.5s"]


def test_speedup_is_measured_over_several_windows() -> None:
    """Probes are 1% of the steps: one window holds too few of them."""

    def probed(i: int) -> RuntimeState:
        return state(
            10 * i,
            speedup=SpeedupCounters(baseline_tokens=min(i, 5), baseline_s=1.0, speculative_tokens=9, speculative_s=1.0),
        )

    history, at = watched([{"a": probed(i)} for i in range(13)])
    current = windows.windows(history, at, WINDOW_S).current
    assert current is not None
    assert current.rare.speedup.baseline_tokens == 5


def _drafts(tried: int, accepted: int) -> RuntimeState:
    drafter = DrafterReport(name="pld", loaded=True, request_steps=tried, tried=tried, accepted=accepted)
    return state(tried, drafters=[drafter], steps=tried, draft_length_steps=[0, tried])


def test_old_and_new_pods_never_add_up_under_one_drafters_name() -> None:
    """A good draft of three old pods and a bad one of a new pod, of the same name: the share that is accepted was their
    mean. Tokens and classes are the service's, whichever pod gave them."""
    history = windows.following(windows.History(), "old")
    for step in range(10):
        states = {
            "a": _drafts(100 * step, 80 * step),
            "b": _drafts(100 * step, 80 * step),
            "new": _drafts(90 * step, 0),
        }
        history = windows.record(history, states, NAMES, 3, START + 10 * step, WINDOW_S, {"new"})
    figures = windows.windows(history, START + 90, WINDOW_S).current
    assert figures is not None
    assert (figures.gained.tried, figures.gained.accepted) == (1200, 960)
    assert (figures.gained.request_steps, figures.gained.output_tokens) == (6 * 200, 6 * 290)


def test_figures_of_the_next_revision_start_at_zero() -> None:
    """Once most pods are new, nothing of the old ones is left in the window, nor what a new pod did before that."""
    history = windows.following(windows.History(), "old")
    for step in range(10):
        states = {"a": _drafts(100 * step, 80 * step), "new": _drafts(50 * step, 0)}
        history = windows.record(history, states, NAMES, 2, START + 10 * step, WINDOW_S, {"new"})
    history = windows.following(history, "new")
    for step in range(10, 13):
        states = {"a": _drafts(100 * step, 80 * step), "new": _drafts(50 * step, 0)}
        history = windows.record(history, states, NAMES, 2, START + 10 * step, WINDOW_S, {"a"})
    figures = windows.windows(history, START + 120, WINDOW_S).current
    assert figures is not None
    assert (figures.gained.tried, figures.gained.accepted) == (150, 0)
    assert figures.gained.output_tokens == 6 * 150


def test_the_revision_that_is_followed_is_that_of_most_pods() -> None:
    assert windows.followed_revision({"a": "old", "b": "old", "c": "new"}, "new") == "old"
    assert windows.followed_revision({"a": "old", "c": "new"}, "new") == "new"
    assert windows.followed_revision({}, "new") == "new"


def test_figures_by_adapter_are_summed_over_pods_and_classes() -> None:
    """Only adapters of the spec count, as with drafters and classes."""
    adapters = [{"name": "support", "source": {"hub": {"repository": "acme/support"}}}]
    names = windows.names_of(manifest(engine={"lora": {}}, adapters=adapters))

    def pod(scale: int) -> RuntimeState:
        counted = {"finished": {"chat": 2 * scale, "batch": scale}, "attained": {"chat": scale}}
        rows = [AdapterState(name=name, tried=4 * scale, accepted=scale, **counted) for name in ("support", "made-up")]
        return state(adapters=rows)

    history = windows.History()
    for i in range(8):
        history = windows.record(history, {"a": pod(i), "b": pod(2 * i)}, names, 2, START + 10 * i, 60.0)
    figures = windows.windows(history, START + 70, 60.0).current
    assert figures is not None
    finished, attained = {"chat": 36, "batch": 18}, {"chat": 18}
    support = AdapterCounters(tried=72, accepted=18, finished=finished, attained=attained)
    assert figures.gained.adapters == {"support": support}
