"""What a finished step teaches."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.plans import DraftPlan, ExecutionMode, Outcome, Purpose
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.trials import Neighbour, TrialSchedule

from tests.unit.control import columns

DRAFT = Drafter("draft", passes=True, needs_kv=True)
STEP_S = 0.010


def seen(evidence: Evidence, purpose: Purpose, draft_s: float = float("nan")) -> None:
    """Observe a step of two requests that verifies nothing. draft_s: seconds of a pass that feeds the draft model."""
    nothing = columns.proposals([0, 0])
    none, trial = np.zeros(1, np.int64), np.ones(1, np.int64)
    plan = DraftPlan(none, trial, np.full((1, 2), -1), np.ones((1, 2), np.int64), purpose)
    evidence.observe(
        Outcome(
            output_at_s=1.0, step_s=STEP_S + (0.0 if np.isnan(draft_s) else draft_s), target_s=STEP_S - 0.001,
            draft_s=np.array([draft_s]), mode=ExecutionMode.UNIFORM, tokens=2, batch=columns.batch(2),
            draft_plan=plan, verify_purpose=purpose, forest=nothing, verified=np.zeros(0, bool),
            accepted=np.zeros(0, bool), tried=np.zeros(0, bool),
        )
    )  # fmt: skip


def test_probe_leaves_out_the_time_of_feeding_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a draft model that is fed in probes, too, made plain decoding look slower by a pass, and so speculation
    better than it is."""
    evidence = Evidence(Settings((DRAFT,), 3, 8), None, np.random.default_rng(0))
    for _ in range(50):
        seen(evidence, Purpose.FIXED)  # the cost of plain decoding is learned
    plain: list[float] = []
    observe = evidence.trials.speedup.observe_plain

    def note(work_s: float, seconds: float, tokens: int) -> None:
        plain.append(seconds)
        observe(work_s, seconds, tokens)

    monkeypatch.setattr(evidence.trials.speedup, "observe_plain", note)
    seen(evidence, Purpose.PROBE, draft_s=0.004)
    seen(evidence, Purpose.PROBE)
    assert plain == pytest.approx([STEP_S, STEP_S])


def test_exploration_does_not_move_lambda() -> None:
    """Bug: explorations counted towards lambda. The first ones feed a draft model and halved lambda for hundreds of
    steps: time looked cheap, and a draft that loses to plain decoding was chosen."""
    evidence = Evidence(Settings((DRAFT,), 3, 8), None, np.random.default_rng(0))
    for _ in range(50):
        seen(evidence, Purpose.FIXED)
    before = evidence.goodput.ratio
    for _ in range(4):
        seen(evidence, Purpose.EXPLORE, draft_s=0.03)
    assert evidence.goodput.ratio == before


@pytest.mark.parametrize("purpose", [Purpose.EXPLORE, Purpose.PROBE])
def test_trial_of_either_kind_is_charged_to_one_account(purpose: Purpose) -> None:
    evidence = Evidence(Settings((DRAFT,), 3, 8), None, np.random.default_rng(0))
    for _ in range(50):
        seen(evidence, Purpose.FIXED)
    before = evidence.trials.credit
    for _ in range(4):
        seen(evidence, purpose, draft_s=0.03)
    assert evidence.trials.credit < before - 0.3


@pytest.mark.parametrize(("speculative_s", "plain_s"), [(0.0, 0.01), (0.01, 0.0), (0.0, 0.0)])
def test_probe_compared_with_steps_without_tokens_is_ignored(speculative_s: float, plain_s: float) -> None:
    """Bug: the log of a speed-up of 0 was taken, and a number divided by it. Aborted requests get no tokens in their
    last step."""
    trials = TrialSchedule(np.random.default_rng(0))
    for _ in range(100):
        if trials.step(4, speculating=True):
            trials.speedup.observe_plain(plain_s, 0.01, 0)
        else:
            trials.observe(Neighbour(speculative_s, 0.01, 0.01), speculates=True)
    assert trials.speedup.counts.probes == 0
    assert not trials.off


def test_probe_with_drafts_longer_than_their_step_has_a_verdict() -> None:
    """Bug: under asynchronous scheduling a draft's time may exceed the wall time of its own step. The seconds of plain
    decoding were negative then, and the logarithm of their sum raised: the loop suspended every drafter."""
    trials = TrialSchedule(np.random.default_rng(0))
    for step in range(3000):
        if trials.step(4, speculating=True):
            trials.speedup.observe_plain(0.01, -0.5 if step % 4 == 1 else 0.01, 4)
        else:
            trials.observe(Neighbour(0.01, 0.01, 0.01), speculates=True)
