"""Compile what is hot before the engine is ready: a few steps of a controller that nobody else sees.

    python -m outrider_runtime.control.warm_up

does it for every kind of drafter, while an image is built.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from outrider_runtime.control.caches import LOOK_EVERY_STEPS
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.cost.model import DrafterCost, LatencyModel, Shape, StepCost
from outrider_runtime.control.data.batch import NOBODY, Batch, Waiting
from outrider_runtime.control.data.forest import chains
from outrider_runtime.control.data.plans import ExecutionMode, Outcome
from outrider_runtime.control.settings import MATCH_EDGES, Drafter, HotSettings, Settings, SLOClass

DRAFTERS = (
    Drafter("head", passes=True, needs_hidden=True),
    Drafter("draft", passes=True, needs_kv=True),
    Drafter("lookup", confidence_edges=MATCH_EDGES),
)
REQUESTS = 4
STEPS = LOOK_EVERY_STEPS + 2
CANARY_STEPS = 2  # the first proposes, the second has something to verify
WHOLE_STEPS, MISSING = 4, 100
"""After that many steps, tokens that each drafter misses of each request: it is asked whether it pays to feed them."""
TPOT_S, ELAPSED_S, EMITTED = 0.008, 0.0705, 10
"""Everybody is late and can still make it with two tokens a step."""


def compile_all(settings: Settings) -> None:
    """Call before readiness. Where the code is not on disk yet it takes minutes."""
    hot = HotSettings(max_draft_tokens=settings.max_draft_tokens, slo_classes=(SLOClass("any", TPOT_S),))
    settings = dataclasses.replace(settings, slots=max(REQUESTS, settings.slots), hot=hot)
    cost = StepCost(per_batched_token_s=1e-6, per_batched_token_above_knee_s=1e-5, knee_tokens=8, constant_s=1e-2)
    model = LatencyModel(
        dict.fromkeys(ExecutionMode, cost),
        {one.name: DrafterCost(StepCost(constant_s=1e-5), one.passes) for one in settings.drafters},
    )
    loop = Controller(settings, model, clock=lambda: 0.0, rng=np.random.default_rng(0))
    for step in range(STEPS):
        _step(loop, step)
    everyone = frozenset(drafter.name for drafter in settings.drafters)
    loop.configure(dataclasses.replace(hot, arms=(everyone, everyone)))
    for step in range(STEPS, STEPS + CANARY_STEPS):
        _step(loop, step)
    loop.release(np.arange(REQUESTS))
    cost.seconds(Shape(0.0, 1.0, 1.0))


def _step(loop: Controller, step: int) -> None:
    """Everybody is late, somebody waits, and all that is proposed is accepted."""
    drafters, rows = loop.settings.drafters, np.arange(REQUESTS)
    prompt = np.array([64] + [0] * (REQUESTS - 1)) * (step == 0)
    missing = np.full((len(drafters), REQUESTS), MISSING if step >= WHOLE_STEPS else 1)
    batch = Batch(
        rows, np.zeros(REQUESTS, np.int64), np.full(REQUESTS, 100), prompt, np.zeros(REQUESTS, np.int64),
        np.full(REQUESTS, 100), np.full(REQUESTS, EMITTED), np.full(REQUESTS, ELAPSED_S), missing,
        float(step), 8192, 10**6, Waiting(0, 64, 100), arm=None if loop.settings.hot.arms is None else rows % 2,
    )  # fmt: skip
    draft = loop.plan_draft(batch)
    who = draft.asked[0] if draft.passes.any() or not drafters else np.zeros(REQUESTS, np.int64)
    lengths = np.where(who == NOBODY, 0, np.maximum(1, draft.passes[who])) if drafters else np.zeros(REQUESTS, np.int64)
    asked = np.stack([who, np.full(REQUESTS, NOBODY)])
    forest = chains(lengths, who, draft, asked, np.zeros(int(lengths.sum())) if step % 2 else None)
    verify = loop.plan_verify(batch, forest)
    loop.observe(
        Outcome(
            float(step) + 0.5, 0.0105, 0.01, np.full(len(drafters), 1e-5), ExecutionMode.RAGGED, REQUESTS, batch, draft,
            verify.purpose, forest, verify.nodes, verify.nodes, verify.nodes,
        )
    )  # fmt: skip


if __name__ == "__main__":
    compile_all(Settings(DRAFTERS, max_draft_tokens=5, slots=REQUESTS))
