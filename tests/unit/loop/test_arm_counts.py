"""A canary's books: arms are drawn fairly, each request counts once and whole, and a changed config is in force."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_crds.counters import ArmCounters
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.runtime_config import CanaryConfig, config_hash
from outrider_crds.runtime_state import CanaryState
from outrider_crds.spec import DraftPrefillMode, SpeculationMode
from outrider_runtime.control.arm_prices import Credits
from outrider_runtime.control.batch import CANDIDATE, NO_ARM, NO_DRAFTER, STABLE, Batch
from outrider_runtime.control.plans import DraftPlan, Outcome
from outrider_runtime.loop.arm_counts import ArmCounter, canary_problem
from outrider_runtime.loop.control_loop import ControlLoop, UnusableConfigError
from outrider_runtime.loop.steps import FinishedStep
from outrider_runtime.loop.why import decision_sentence

from tests.engine.engines import TARGET, boot_config, draft_model, eagle, hot_config, lookup
from tests.unit.loop.pods import control_loop, stepper
from tests.unit.loop.test_state_and_hot_files import Pod
from tests.unit.loop.test_stepper import RUNNING, Engine

POOL = (lookup(), eagle(), draft_model(TARGET))
NAMES = ["pld", "eagle", "draft"]
CANARY = CanaryConfig(id="a", stable=["pld", "eagle"], candidate=["pld", "draft"], candidate_percent=50)
ALLOWED = {STABLE: {0, 1}, CANDIDATE: {0, 2}, NO_ARM: {0, 1}}


def counter(**change: Any) -> ArmCounter:
    made = ArmCounter(np.random.default_rng(0))
    made.configure(CANARY.model_copy(update=change))
    return made


def canary_state(loop: ControlLoop) -> CanaryState:
    state = loop.arms.state()
    assert state is not None
    return state


def start(loop: ControlLoop, **change: Any) -> None:
    loop.configure(hot_config().model_copy(update={"canary": CANARY.model_copy(update=change)}))


@pytest.mark.parametrize(("percent", "requests"), [(50, 10), (20, 10), (5, 20), (33, 100), (0, 10), (100, 10)])
def test_each_slo_class_is_shared_out_as_ordered(percent: int, requests: int) -> None:
    """An arm that got more of the impatient requests by chance would look worse than it is."""
    arms = counter(candidate_percent=percent)
    for slo_class in ("chat", "bulk", None):
        drawn = Counter(arms.arrived(f"{slo_class}{n}", slo_class) for n in range(requests))
        assert drawn[CANDIDATE] == requests * percent // 100
        assert drawn.total() == requests


def test_arms_do_not_fall_into_step_with_traffic_that_alternates() -> None:
    """Two kinds of requests in turn: taking turns with the arms, too, would give each arm one kind."""
    arms = counter()
    drawn = [arms.arrived(str(n), "chat") for n in range(400)]
    assert 60 < sum(drawn[::2]) < 140


def test_request_counts_once_its_last_step_is_observed() -> None:
    """Answers end before their last step is reported in asynchronous scheduling."""
    arms = counter(candidate_percent=100)
    arms.arrived("r", "chat")
    arms.runs("r")
    arms.add(["r"], credits_of(3))
    arms.add(["r"], credits_of(1)._replace(is_counted=False))
    arms.left("r", 7)
    arms.ended("r", 6, attained=True)
    arms.observed(7)
    assert _candidate(arms).requests == 0
    arms.add(["r"], credits_of(4)._replace(speculates=np.array([False])))
    arms.observed(8)
    expected = ArmCounters(
        requests=1, tokens=4, plain_s=0.5, speculated_s=0.375 * 4 / 7, price_s=0.5, batch_steps=[2],
        plain_squared=0.25, price_squared=0.25, plain_times_price=0.25,
        finished={"chat": 1}, attained={"chat": 1},
    )  # fmt: skip
    assert _candidate(arms) == expected, (
        "6 tokens, less the prompt's and the probe's; of steps beyond the end the price counts, and no token"
    )


def test_preempted_request_has_no_credit_for_a_second_prefill() -> None:
    """Bug: the token that the second reading of a prompt ends with raised the plain seconds, and had no price."""
    arms = counter(candidate_percent=100)
    arms.arrived("r", "chat")
    arms.runs("r")
    arms.add(["r"], credits_of(3))
    arms.left("r", 1)
    arms.runs("r")
    arms.add(["r"], credits_of(3))
    arms.left("r", 3)
    arms.ended("r", 1 + 3 + 1 + 3, attained=True)
    arms.observed(4)
    assert (_candidate(arms).tokens, _candidate(arms).plain_s) == (7, 6 * PLAIN_TOKEN_S)


def test_steps_of_a_request_are_counted_by_the_size_of_the_batch() -> None:
    """A request whose prompt is read in the step does not decode in it."""
    arms = counter(candidate_percent=100)
    arms.arrived("r", "chat")
    arms.runs("r")
    for others in ([], [1, 0], [1, 1], [1, 1, 1], [1] * 4):
        tokens = np.array([1, *others])
        seconds, names = np.ones(len(tokens)), ["r", *map(str, others)]
        arms.add(names, Credits(tokens, seconds, seconds, seconds > 0, 1.0))
    arms.left("r", 1)
    arms.ended("r", 6, attained=None)
    arms.observed(2)
    assert _candidate(arms).batch_steps == [1, 2, 2]


PLAIN_TOKEN_S = 0.125


def credits_of(tokens: int) -> Credits:
    """A step that speculated for one request."""
    plain_s = np.array([tokens * PLAIN_TOKEN_S])
    return Credits(np.array([tokens]), np.array([0.25]), plain_s, np.array([True]), PLAIN_TOKEN_S)


def _candidate(arms: ArmCounter) -> ArmCounters:
    state = arms.state()
    assert state is not None
    return state.candidate


def test_new_attempt_counts_from_0_and_keeps_running_arms() -> None:
    loop = control_loop(POOL)
    start(loop)
    engine = Engine(stepper(loop), 1, np.random.default_rng(0))
    for _ in range(RUNNING):
        engine.add(6, 40)
    for _ in range(5):
        engine.step()
    before = [loop_arm(engine, request.name) for request in engine.running]
    start(loop, id="b")
    assert canary_state(loop) == CanaryState(id="b")
    engine.step()
    assert [loop_arm(engine, request.name) for request in engine.running] == before
    while engine.running:
        engine.step()
    assert canary_state(loop).stable.requests + canary_state(loop).candidate.requests == 0, "they began before it"
    loop.configure(hot_config())
    assert loop.arms.state() is None


def test_plans_of_another_attempt_rest_on_none_of_the_failed_run() -> None:
    """Bug: after `retry` the sums began again, and were weighted by the batch sizes of the attempt before."""
    loop = control_loop(POOL)
    start(loop)
    engine = Engine(stepper(loop), 0, np.random.default_rng(0))
    for tokens in (30, 12, 4, 2):
        engine.add(6, tokens)
    run_dry(engine)
    engine.add(6, 40)
    start(loop, id="b")
    engine.step()
    engine.step()
    made = loop._controller.credits
    assert made is not None
    assert made.plain_s.tolist() == (made.tokens * made.plain_token_s).tolist(), "no weight but 1"


def loop_arm(engine: Engine, name: str) -> int:
    slots = engine.steps.requests.slots.of([name])
    arms = engine.steps.requests.arms(slots)
    assert arms is not None
    return int(arms[0])


class ByHand:
    """Counts what each request of a loop paid and was worth, and checks its drafters."""

    def __init__(self, loop: ControlLoop) -> None:
        self.paid, self.worth, self.arm_of = dict[str, float](), dict[str, float](), dict[str, int]()
        self.uncounted = set[str]()
        """Requests that were there, not counted yet, at a decision without a drafter of the candidate."""
        self.lacked_a_drafter = set[str]()
        """Requests with a step of such a decision."""
        self._loop = loop
        self._add, loop.arms.add = loop.arms.add, self.add  # type: ignore[method-assign]
        self._plan_draft, loop.plan_draft = loop.plan_draft, self.plan_draft  # type: ignore[method-assign]
        loop.listeners.append(self.check)

    def plan_draft(self, batch: Batch) -> DraftPlan:
        if NAMES[2] in self._loop._available._until:
            self.uncounted |= {*self._loop.arms._members}
            self.lacked_a_drafter |= {*self._loop.request_names}
        return self._plan_draft(batch)

    def add(self, names: Any, made: Credits) -> None:
        self._add(names, made)
        for name, price_s, plain_s in zip(names, made.price_s.tolist(), made.plain_s.tolist(), strict=True):
            self.paid[name] = self.paid.get(name, 0.0) + (price_s if made.is_counted else 0.0)
            self.worth[name] = self.worth.get(name, 0.0) + (plain_s if made.is_counted else 0.0)

    def check(self, report: FinishedStep) -> None:
        batch, plan = report.outcome.batch, report.outcome.draft_plan
        assert batch.arm is not None
        for name, arm, order in zip(report.step.names, batch.arm.tolist(), plan.drafter_order.T.tolist(), strict=True):
            self.arm_of[name] = arm
            assert {*order} - {NO_DRAFTER} <= ALLOWED[arm]

    def most_worth(self, arm: int) -> float:
        """Plain seconds of the arm's tokens, those behind the ends of answers included."""
        counted = (name for name in self.worth if name not in self.uncounted and self.arm_of[name] == arm)
        return sum(self.worth[name] for name in counted)

    def prices(self, arm: int) -> list[float]:
        paid = {name: price_s for name, price_s in self.paid.items() if name not in self.uncounted}
        return [price_s for name, price_s in paid.items() if self.arm_of[name] == arm and price_s > 0]


def run_dry(engine: Engine) -> None:
    """Step until every answer is complete and every step observed."""
    while engine.running or engine.waiting:
        engine.step()
    while engine.flights:
        engine.land()


EVENTS = ["add", "step", "step", "step", "abort", "preempt", "fail", "resume"]


@given(st.lists(st.sampled_from(EVENTS), max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_sums_equal_a_count_by_hand_whatever_comes_and_goes(events: list[str], data: Any) -> None:
    """No request asks a drafter of the other arm, none counts twice, and each counts with all that it got and cost."""
    ahead, seed = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 99))
    loop = control_loop(POOL, scores_placeholders=bool(ahead), seed=seed)
    start(loop)
    engine, by_hand, failures = Engine(stepper(loop), ahead, np.random.default_rng(seed)), ByHand(loop), 0
    for event in events:
        if event == "add":
            engine.add(data.draw(st.integers(1, 30)), data.draw(st.integers(1, 12)))
        elif event == "fail":
            failures += NAMES[2] not in loop._available._until
            loop.drafter_failed(NAMES[2], "RuntimeError: no memory")
        elif event == "resume":
            loop.resume(NAMES[2])
        elif event == "step":
            engine.step()
        elif engine.running:
            getattr(engine, event)(data.draw(st.integers(0, 9)))
    run_dry(engine)
    assert not loop.failures
    assert not loop.arms._members
    assert by_hand.lacked_a_drafter <= by_hand.uncounted
    state = canary_state(loop)
    assert (state.stable.failures, state.candidate.failures) == (0, failures)
    for arm, sums in ((STABLE, state.stable), (CANDIDATE, state.candidate)):
        prices = by_hand.prices(arm)
        assert sums.requests == len(prices)
        assert math.isclose(sums.price_s, sum(prices), abs_tol=1e-12)
        assert math.isclose(sums.price_squared, sum(price_s**2 for price_s in prices), abs_tol=1e-12)
        assert 0.0 <= sums.speculated_s <= sums.plain_s <= by_hand.most_worth(arm) * (1 + 1e-12)


Change = Callable[[ControlLoop], object]


def hot_change(**change: Any) -> Change:
    """Put a hot config with the canary and this change in force."""
    return lambda loop: loop.configure(hot_config().model_copy(update={"canary": CANARY} | change))


def fail(loop: ControlLoop, *, times: int) -> None:
    for _ in range(times):
        loop.failed(RuntimeError("a bug"))


INCOMPARABLE: dict[str, Change] = {
    "speculation off": hot_change(mode=SpeculationMode.OFF),
    "no draft tokens": hot_change(max_draft_tokens=0),
    "no prefill of drafters": hot_change(draft_prefill=DraftPrefillMode.NEVER),
    "candidate's drafter paused": hot_change(paused_drafters=["draft"]),
    "stable's drafter paused": hot_change(paused_drafters=["eagle"]),
    "drafter of both paused": hot_change(paused_drafters=["pld"]),
    "drafter suspended": lambda loop: loop.drafter_failed("draft", "RuntimeError: no memory"),
    "exceptions in the loop": lambda loop: fail(loop, times=3),
    "drafter pinned": lambda loop: loop.pin(2, "pld"),
}


def resume_all(loop: ControlLoop) -> None:
    start(loop)
    loop.pin(None)
    for name in NAMES:
        loop.resume(name)


def finished_requests(loop: ControlLoop) -> int:
    return sum(arm.requests for arm in (canary_state(loop).stable, canary_state(loop).candidate))


def finished_with_verdict(loop: ControlLoop) -> int:
    return sum(sum(arm.finished.values()) for arm in (canary_state(loop).stable, canary_state(loop).candidate))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("change", INCOMPARABLE.values(), ids=INCOMPARABLE)
def test_requests_count_only_while_arms_can_be_compared(change: Change, ahead: int) -> None:
    """Bug: with speculation off, or the candidate's drafter paused, both arms decoded plainly and any draft was
    promoted as equal."""
    loop = control_loop(POOL, scores_placeholders=bool(ahead))
    start(loop)
    engine = Engine(stepper(loop), ahead, np.random.default_rng(0))
    serve(engine, requests=4)
    assert finished_requests(loop) == finished_with_verdict(loop) == 4
    change(loop)
    serve(engine, requests=4)
    assert finished_requests(loop) == finished_with_verdict(loop) == 4
    resume_all(loop)
    serve(engine, requests=4)
    assert finished_requests(loop) == finished_with_verdict(loop) == 8


def serve(engine: Engine, *, requests: int) -> None:
    for _ in range(requests):
        engine.add(6, 12)
    run_dry(engine)


@pytest.mark.parametrize("change", INCOMPARABLE.values(), ids=INCOMPARABLE)
def test_requests_that_ran_partly_incomparable_do_not_count(change: Change) -> None:
    """A drafter that missed a part of a request is worse at the rest of it."""
    loop = control_loop(POOL)
    start(loop)
    engine = Engine(stepper(loop), 1, np.random.default_rng(0))
    for _ in range(RUNNING):
        engine.add(6, 40)
    for _ in range(3):
        engine.step()
    change(loop)
    engine.step()
    resume_all(loop)
    run_dry(engine)
    assert finished_requests(loop) == finished_with_verdict(loop) == 0
    assert not loop.arms._members


@pytest.mark.parametrize("hosted", [POOL, POOL[:2]], ids=["hosted", "not hosted"])
def test_drafter_that_did_not_load_leaves_no_request_counted(hosted: Sequence[DrafterSpec]) -> None:
    """Bug: with `onMissingDrafter: Continue` a missing draft was an arm as good as the other, and was promoted."""
    loop = ControlLoop(
        boot_config(POOL), hot_config(), hosted, max_requests=RUNNING, left_out={"draft": "it was not found"}
    )
    start(loop)
    serve(Engine(stepper(loop), 1, np.random.default_rng(0)), requests=4)
    assert finished_requests(loop) == finished_with_verdict(loop) == 0


def test_exception_in_the_books_leaves_no_request_without_price() -> None:
    """Bug: the tokens of a step that the loop could not observe counted, and its price did not."""
    loop = control_loop(POOL)
    start(loop)
    engine = Engine(stepper(loop), 0, np.random.default_rng(0))
    engine.add(6, 4)
    engine.step()
    observe, loop._controller.observe = loop._controller.observe, broken  # type: ignore[method-assign]
    engine.step()
    loop._controller.observe = observe  # type: ignore[method-assign]
    resume_all(loop)
    run_dry(engine)
    assert loop.failures
    assert finished_requests(loop) == 0


def broken(outcome: Outcome) -> None:
    raise KeyError(f"a bug at {outcome.output_at_s}")


LOOKUPS = CANARY.model_copy(update={"stable": ["a"], "candidate": ["b"]})


@pytest.mark.parametrize(
    ("pool", "change"),
    [
        (POOL, {"mode": SpeculationMode.STATIC}),
        ((lookup("a"), lookup("b")), {"canary": LOOKUPS, "draft_prefill": DraftPrefillMode.NEVER}),
    ],
    ids=["Static", "lookups, which read no prompt"],
)
def test_arms_that_both_speculate_are_compared(pool: Sequence[DrafterSpec], change: dict[str, Any]) -> None:
    loop = control_loop(pool)
    hot_change(**change)(loop)
    serve(Engine(stepper(loop), 1, np.random.default_rng(0)), requests=4)
    assert finished_requests(loop) == 4


@pytest.mark.parametrize(
    ("failures", "stable", "candidate"),
    [
        (["pld", "pld"], 0, 0),
        (["eagle", "eagle"], 2, 0),
        (["draft", "flash"], 0, 1),
        (["draft", "flash", "draft"], 0, 2),
    ],
)
def test_failures_count_for_the_only_arm_of_a_drafter(failures: list[str], stable: int, candidate: int) -> None:
    """Bug: two errors of a drafter that both arms have, or one of each of two, failed the candidate."""
    arms = counter(candidate=["pld", "draft", "flash"])
    for drafter in failures:
        arms.failed(drafter)
    state = arms.state()
    assert state is not None
    assert (state.stable.failures, state.candidate.failures) == (stable, candidate)


def test_tokens_are_what_users_got_after_the_first_one() -> None:
    loop = control_loop(POOL)
    start(loop)
    engine = Engine(stepper(loop), 1, np.random.default_rng(3))
    for _, output in itertools.product(range(3), (9, 14)):
        engine.add(6, output)
    run_dry(engine)
    state = canary_state(loop)
    assert state.stable.requests + state.candidate.requests == 6
    assert state.stable.tokens + state.candidate.tokens == 3 * (8 + 13)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"candidate": ["pld", "draft", "flash"]}, "flash is not among the drafters"),
        ({"candidate": ["pld"]}, "draft is in neither arm"),
    ],
)
def test_canary_that_does_not_fit_the_pool_is_refused(change: dict[str, Any], said: str) -> None:
    canary = CANARY.model_copy(update=change)
    assert said in canary_problem(canary, NAMES)
    loop = control_loop(POOL)
    with pytest.raises(UnusableConfigError, match=said):
        loop.configure(hot_config().model_copy(update={"canary": canary}))
    assert loop.arms.state() is None


def test_pod_with_an_unusable_canary_says_so_and_serves_on(tmp_path: Path) -> None:
    """Like other hot configs: the one before it stays in force, and its hash is echoed."""
    pod = Pod(tmp_path)
    good = hot_config().model_copy(
        update={"canary": CanaryConfig(id="a", stable=["pld"], candidate=["draft"], candidate_percent=50)}
    )
    pod.write_hot(good)
    state = pod.tick()
    assert state.canary == CanaryState(id="a")
    assert state.config_hash == config_hash(good)
    assert good.canary is not None
    bad = good.model_copy(update={"canary": good.canary.model_copy(update={"id": "b", "stable": ["nobody"]})})
    pod.write_hot(bad)
    state = pod.tick()
    assert "nobody is not among the drafters" in state.config_error
    assert state.config_hash == config_hash(good)
    assert state.canary == CanaryState(id="a")
    pod.write_hot(hot_config())
    state = pod.tick()
    assert (state.canary, state.config_error) == (None, "")


def test_engine_starts_under_an_unusable_canary_without_one(tmp_path: Path) -> None:
    """A start that failed would keep the pod down until the config changes."""
    pod = Pod(tmp_path)
    canary = CanaryConfig(id="a", stable=["nobody"], candidate=["draft"], candidate_percent=50)
    pod.plan = pod.plan.model_copy(update={"hot": hot_config().model_copy(update={"canary": canary})})
    assert pod.control_loop().arms.state() is None


def test_last_decisions_name_the_arms() -> None:
    loop = control_loop(POOL)
    start(loop)
    engine = Engine(stepper(loop), 0, np.random.default_rng(1))
    for _ in range(RUNNING):
        engine.add(6, 60)
    sentences = set[str]()
    for _ in range(20):
        engine.step()
        made = loop.last_decision()
        assert made is not None
        sentences.add(decision_sentence(NAMES, made.batch, made.plan, made.weighed))
    assert any("stable: k = " in said and "candidate: k = " in said for said in sentences), sentences
    assert all(said.startswith("4 requests (") for said in sentences)
