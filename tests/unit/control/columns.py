"""Batches and forests for tests, from the few columns that a test is about."""

from __future__ import annotations

from typing import Any

import numpy as np
from outrider_runtime.control.batch import NO_CLASS, Batch
from outrider_runtime.control.choose_drafters import Choice, best_choice, variants
from outrider_runtime.control.draft_options import DraftOptions
from outrider_runtime.control.plans import DraftPlan, Forest, Purpose, chains


def batch(requests: int, drafters: int = 1, **columns: Any) -> Batch:
    """A batch of `requests` that decode, in the slots 0, 1, ..; `columns` replace the defaults."""
    ints = {name: np.zeros(requests, np.int64) for name in ("prompt", "prompt_left")}
    values: dict[str, Any] = ints | {
        "slot": np.arange(requests), "slo_class": np.full(requests, NO_CLASS), "context": np.full(requests, 100),
        "left": np.full(requests, 100), "emitted": np.full(requests, 10), "elapsed_s": np.full(requests, 0.1),
        "missing": np.ones((drafters, requests), np.int64),
        "now_s": 0.0, "token_budget": 8192, "free_kv_tokens": 10**6,
    }  # fmt: skip
    replaced = {
        name: np.asarray(value) if isinstance(value, list | np.ndarray) else value for name, value in columns.items()
    }
    return Batch(**(values | replaced))


def proposals(lengths: list[int], drafter: int = 0, drafters: int = 1, confidence: Any = None) -> Forest:
    """A chain of `lengths` nodes for each request, all proposed by one drafter."""
    passes = np.zeros(drafters, np.int64)
    passes[drafter] = max(lengths, default=0)
    order = np.full((1, len(lengths)), drafter)
    feed = np.zeros((drafters, len(lengths)), np.int64)
    plan = DraftPlan(passes, np.ones_like(passes), order, feed, Purpose.CHOICE)
    return chains(np.array(lengths), np.full(len(lengths), drafter), plan, order, confidence)


def kept(forest: Forest, accepted_lengths: list[int]) -> np.ndarray:
    """(M,): the first `accepted_lengths` nodes of each request's chain."""
    return np.asarray(forest.depth <= np.array(accepted_lengths)[forest.request])


def choose(options: DraftOptions) -> Choice:
    """The best choice of these options."""
    return best_choice(options, variants(options.autoregressive, options.stands_in, options.beams.widest), 1.0)
