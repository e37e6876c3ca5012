"""The simulated engine keeps vLLM's books: token budget, KV memory, draft KV holes, whole answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_runtime.control.batch import Batch, DraftPlan, ExecutionMode, StepOutcome, VerifyPlan
from outrider_runtime.control.costs import DrafterCost, LatencyModel, StepCost
from outrider_runtime.simulate.books import Request
from outrider_runtime.simulate.engine import Engine
from outrider_runtime.simulate.scheduling import Limits, Scheduler
from outrider_runtime.simulate.truth import AcceptanceRule, AcceptanceRules, World
from outrider_runtime.simulate.workload import Arrival, OpenLoop

TARGET = StepCost(per_context_token_s=1e-7, per_batched_token_s=1e-5, constant_s=5e-3)
DRAFT = DrafterCost(StepCost(constant_s=5e-4))


class FixedLengths:
    """A policy that always proposes and verifies `draft_tokens`, and notes what it was shown."""

    def __init__(self, draft_tokens: int = 0, neural_every: int = 1) -> None:
        self.draft_tokens, self._every = draft_tokens, neural_every
        self.batches: list[Batch] = []
        self.outcomes: list[StepOutcome] = []
        self.forgotten: list[str] = []

    def plan_verify(self, batch: Batch) -> VerifyPlan:
        return VerifyPlan(tuple(max(0, min(view.proposed, view.remaining_tokens - 1)) for view in batch.requests))

    def plan_draft(self, batch: Batch) -> DraftPlan:
        self.batches.append(batch)
        k = self.draft_tokens if len(self.batches) % self._every == 0 else 0
        names = tuple("draft" if k and view.prefill_left == 0 else None for view in batch.requests)
        return DraftPlan(k, names, k > 0, k > 0, k)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def world(alpha: float = 0.7) -> World:
    latency = LatencyModel(dict.fromkeys(ExecutionMode, TARGET), {"draft": DRAFT})
    return World(latency, AcceptanceRules([AcceptanceRule("draft", (alpha,))], 8), neural="draft", noise=0.0)


def run(arrivals: list[Arrival], limits: Limits, policy: FixedLengths, alpha: float = 0.7) -> Engine:
    engine = Engine(world(alpha), policy, OpenLoop(arrivals), limits, np.random.default_rng(0))
    engine.run()
    return engine


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(0, 4),
    st.integers(8, 128),
    st.integers(352, 1024),
)
def test_every_request_gets_its_tokens_within_budget_and_memory(requests, draft_tokens, budget, kv_tokens):
    """Whatever the load, the draft length, the token budget and the KV memory: preempted requests end too."""
    policy = FixedLengths(draft_tokens)
    limits = Limits(token_budget=budget, max_requests=6, kv_tokens=kv_tokens)
    engine = run([Arrival(*request) for request in requests], limits, policy)
    assert sorted(one.output_tokens for one in engine.finished) == sorted(output for _, _, output in requests)
    assert len(set(policy.forgotten)) == len(requests)
    assert sum(outcome.tokens for outcome in policy.outcomes) == sum(output for _, _, output in requests)
    assert max(outcome.n_batched for outcome in policy.outcomes) <= budget
    assert max(outcome.n_requests for outcome in policy.outcomes) <= 6
    assert all(batch.free_kv_tokens >= 0 for batch in policy.batches)
    assert all(0 < one.ttft_s <= one.latency_s for one in engine.finished)


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests():
    """A step never holds more than the token budget, and the one that decodes goes on meanwhile."""
    policy = FixedLengths()
    run([Arrival(0.0, 10, 50), Arrival(0.01, 1000, 5)], Limits(token_budget=256), policy)
    mixed = [outcome for outcome in policy.outcomes if outcome.prefill_tokens and outcome.n_decoding]
    assert len(mixed) == 4
    assert all(outcome.n_batched <= 256 and outcome.tokens >= 1 for outcome in mixed)
    assert all(outcome.mode is ExecutionMode.RAGGED for outcome in mixed)


def test_where_kv_runs_out_the_last_request_waits_and_is_computed_again():
    """Two requests of 300 tokens in a cache of 400: both finish, one of them later."""
    engine = run([Arrival(0.0, 150, 150), Arrival(0.0, 150, 150)], Limits(kv_tokens=400), FixedLengths())
    assert sorted(one.preemptions > 0 for one in engine.finished) == [False, True]


def test_a_request_that_can_never_fit_is_refused_and_counted():
    """It must not block the queue for ever."""
    engine = run([Arrival(0.0, 500, 10), Arrival(0.1, 20, 10)], Limits(kv_tokens=400), FixedLengths())
    assert (engine.refused, len(engine.finished)) == (1, 1)
    assert run([Arrival(0.0, 90, 20)], Limits(max_model_len=100), FixedLengths()).refused == 1


def test_a_skipped_draft_pass_leaves_a_hole():
    """The controller is told, as it is by the plugin's coverage of KV blocks; EAGLE heads do not mind holes."""
    policy = FixedLengths(2, neural_every=2)
    run([Arrival(0.0, 20, 20)], Limits(), policy)
    assert [batch.requests[0].draft_ready for batch in policy.batches][:3] == [True, False, False]
    assert [batch.requests[0].draft_hole for batch in policy.batches][:3] == [0, 20, 21]


def test_a_catch_up_closes_the_hole_and_takes_its_time():
    """In two chunks, of which the second closes it: the draft runs in that step, too, so it is whole."""

    class CatchesUp(FixedLengths):
        def plan_draft(self, batch: Batch) -> DraftPlan:
            plan, step = super().plan_draft(batch), len(self.batches)
            hole = batch.requests[0].draft_hole
            caught = {3: 15, 4: hole}.get(step)
            return plan if caught is None else replace(plan, catch_up={batch.requests[0].id: caught})

    policy = CatchesUp(2, neural_every=4)
    run([Arrival(0.0, 20, 20)], Limits(), policy)
    assert [batch.requests[0].draft_hole for batch in policy.batches][:5] == [0, 20, 21, 7, 0]
    caught = [outcome.catch_up for outcome in policy.outcomes]
    assert [one.tokens for one in caught if one] == [15, 7]
    assert [one.n_context for one in caught if one] == [0, 15]
    assert caught[2] is not None
    assert policy.outcomes[2].step_s > policy.outcomes[2].target_s + 0.9 * caught[2].seconds > 0


def test_accepted_lengths_follow_the_hazards():
    """Of k = 4 at 0.7 a position: 1 + 0.7 + 0.49 + 0.343 + 0.2401 tokens a step."""
    policy = FixedLengths(4)
    run([Arrival(0.0, 10, 4000)] * 4, Limits(), policy)
    full = [one for outcome in policy.outcomes for one in outcome.requests if one.verified == 4]
    mean = np.mean([one.accepted for one in full])
    assert mean == pytest.approx(0.7 + 0.7**2 + 0.7**3 + 0.7**4, rel=0.04)
    assert all(one.asked == one.proposed == 4 for one in full)


def test_acceptance_changes_with_class_and_time():
    """A class's own rule comes before the general one, and the latest that has begun holds."""
    rules = AcceptanceRules(
        [
            AcceptanceRule("draft", (0.8,)),
            AcceptanceRule("draft", (0.2,), from_s=60.0),
            AcceptanceRule("draft", (0.9, 0.5), slo_class="tight"),
        ],
        3,
    )
    assert rules("draft", None, 1, 10.0) == pytest.approx((0.8, 0.64, 0.512))
    assert rules("draft", "loose", 1, 61.0)[0] == pytest.approx(0.2)
    assert rules("draft", "tight", 1, 61.0) == pytest.approx((0.9, 0.45, 0.225))


def test_a_step_takes_what_the_latency_model_says():
    """Without noise: the target's cost at the step's shape, then the draft's passes."""
    policy = FixedLengths(3)
    run([Arrival(0.0, 100, 30)], Limits(), policy)
    step = next(outcome for outcome in policy.outcomes if outcome.requests and outcome.requests[0].verified == 3)
    assert step.target_s == pytest.approx(5e-3 + 4e-5 + 1e-7 * step.n_context)
    assert step.draft_s == pytest.approx({"draft": 3 * 5e-4})
    assert step.step_s == pytest.approx(step.target_s + 1.5e-3)


def test_the_same_seed_gives_the_same_run():
    """So that two policies can be compared on the same requests, and a figure be repeated."""
    arrivals = [Arrival(0.01 * number, 50, 40) for number in range(20)]
    ends = [run(arrivals, Limits(), FixedLengths(3)).now for _ in range(2)]
    assert ends[0] == ends[1]


def test_a_lowered_token_budget_holds_prompts_back_and_lets_decoding_go_on():
    """As the plugin does for tight classes: who decodes runs first, whatever came first."""
    scheduler = Scheduler(Limits(token_budget=512))
    requests = [Request(number, str(number), Arrival(0.0, 0, 0), None, 400, 20) for number in range(2)]
    for request in requests:
        scheduler.enqueue(request)
    first, second = requests
    assert [one.scheduled for one in scheduler.schedule(())] == [400, 112]
    first.context, second.context = 112, 400  # the second one's prompt is done, the first one's is not
    second.produced = 1
    scheduler.schedule((0, 0), token_budget=100)
    assert (first.scheduled, second.scheduled) == (99, 1)


def test_those_that_wait_are_let_in_by_their_deadline():
    """Where an order is given; else as they came."""
    arrivals = [Arrival(0.0, 10, 30, "loose"), Arrival(0.001, 10, 5, "loose"), Arrival(0.002, 10, 5, "tight")]
    policy, limits = FixedLengths(), Limits(max_requests=1)
    patience = {"tight": 0.1, "loose": 10.0}
    orders = []
    for due in (None, lambda request: request.arrival.at_s + patience[request.slo_class]):
        engine = Engine(world(), policy, OpenLoop(arrivals), limits, np.random.default_rng(0), due=due)
        engine.run()
        orders.append([one.slo_class for one in engine.finished])
    assert orders == [["loose", "loose", "tight"], ["loose", "tight", "loose"]]
