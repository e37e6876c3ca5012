"""Compile the hot functions before the engine is ready, by running a few steps of a throw-away controller."""

from __future__ import annotations

import dataclasses

import numpy as np

from outrider_runtime.control.batch import NO_DRAFTER, Batch, Waiting
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.pending_proposals import no_proposals
from outrider_runtime.control.plans import ExecutionMode, Outcome, chain_verdicts, drop_gaps, step_tokens
from outrider_runtime.control.settings import Drafter, HotSettings, Settings, SLOClass
from outrider_runtime.control.step_times import DrafterCost, LatencyModel, Shape, StepCost

DRAFTERS = (
    Drafter("head", passes=True, needs_hidden=True),
    Drafter("draft", passes=True, needs_kv=True),
    Drafter("lookup"),
)
REQUESTS = 4
STEPS = 10
HELD_STEPS = 3
CANARY_STEPS = 2  # the first proposes, the second has something to verify
WHOLE_STEPS, MISSING = 4, 100
"""Steps without KV gaps; tokens of each KV gap after them, so that the code which weighs feeding them runs, too."""
TPOT_S, ELAPSED_S, EMITTED = 0.008, 0.0705, 10
"""Values that make every request late, and able to meet its TPOT with two tokens per step."""


def compile_all(settings: Settings) -> None:
    """Compile every hot function for the types that `settings` leads to. Call it before the engine is ready. It takes
    minutes if the machine code is not on disk yet."""
    hot = HotSettings(max_draft_tokens=settings.max_draft_tokens, slo_classes=(SLOClass("any", TPOT_S),))
    settings = dataclasses.replace(settings, slots=max(REQUESTS, settings.slots), hot=hot)
    cost = StepCost(per_batched_token_s=1e-6, per_batched_token_above_knee_s=1e-5, knee_tokens=8, constant_s=1e-2)
    model = LatencyModel(
        dict.fromkeys(ExecutionMode, cost),
        {drafter.name: DrafterCost(StepCost(constant_s=1e-5), drafter.passes) for drafter in settings.drafters},
    )
    loop = Controller(settings, model, clock=lambda: 0.0, rng=np.random.default_rng(0))
    for step in range(STEPS):
        _step(loop, step)
    loop.configure(dataclasses.replace(hot, slo_classes=()))  # a choice is held only without classes
    for step in range(STEPS, STEPS + HELD_STEPS):
        _step(loop, step)
    pool = frozenset(drafter.name for drafter in settings.drafters)
    loop.configure(dataclasses.replace(hot, arms=(pool, pool)))
    for step in range(STEPS + HELD_STEPS, STEPS + HELD_STEPS + CANARY_STEPS):
        _step(loop, step)
    loop.release(np.arange(REQUESTS))
    cost.seconds(Shape(0.0, 1.0, 1.0))


def _step(loop: Controller, step: int) -> None:
    """Run a step: every request is late, one more waits, and all proposals are accepted."""
    drafters, rows = loop.settings.drafters, np.arange(REQUESTS)
    prompt = np.array([64] + [0] * (REQUESTS - 1)) * (step == 0)
    missing = np.full((len(drafters), REQUESTS), MISSING if step >= WHOLE_STEPS else 1)
    batch = Batch(
        rows, np.zeros(REQUESTS, np.int64), np.full(REQUESTS, 100), prompt, np.zeros(REQUESTS, np.int64),
        np.full(REQUESTS, 100), np.full(REQUESTS, EMITTED), np.full(REQUESTS, ELAPSED_S), missing,
        float(step), 8192, 10**6, Waiting(0, 64, 100), arm=None if loop.settings.hot.arms is None else rows % 2,
    )  # fmt: skip
    draft = loop.plan_draft(batch)
    first = draft.drafter_order[0] if draft.passes.any() or not drafters else np.zeros(REQUESTS, np.int64)
    lengths = (
        np.where(first == NO_DRAFTER, 0, np.maximum(1, draft.passes[first]))
        if drafters
        else np.zeros(REQUESTS, np.int64)
    )
    proposals, confidence = no_proposals(REQUESTS, loop.settings.max_draft_tokens), np.zeros((REQUESTS, step % 2))
    proposals.ask(
        rows, dataclasses.replace(draft, drafter_order=np.stack([first, np.full_like(first, NO_DRAFTER)])), step
    )
    waiting = proposals.of(rows)
    waiting.record(step, rows, lengths, first, confidence)
    forest = waiting.forest(len(drafters))
    verify = loop.plan_verify(batch, forest)
    chain_verdicts(forest.request, forest.depth, lengths, lengths + 1)
    step_tokens(lengths, prompt)
    plain, whole = np.zeros(len(drafters), bool), np.ones((len(drafters), REQUESTS), bool)
    drop_gaps((draft.passes, np.ascontiguousarray(draft.drafter_order), draft.feed), plain, whole, plain, lengths)
    loop.observe(
        Outcome(
            float(step) + 0.5, 0.0105, 0.01, np.full(len(drafters), 1e-5), ExecutionMode.VARLEN, REQUESTS, batch, draft,
            verify.purpose, forest, verify.nodes, verify.nodes, verify.nodes,
        )
    )  # fmt: skip
