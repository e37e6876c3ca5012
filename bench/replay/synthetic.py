"""Synthetic recordings in which each group of prompts suits another drafter, made from a real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.simulate.recording import DEPTH, Recording, lift

LOOKUP = "lookup"
COPIES = 0.9
"""Acceptance rate of a lookup's proposals."""
MATCH_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Mix:
    pool: tuple[str, ...]
    suits: Mapping[str, Mapping[str, float]]
    """Group -> drafter -> share: of a model's first proposals accepted, or of positions at which a lookup hits."""

    def best_drafters(self) -> dict[str, int]:
        """Return the number of the drafter that suits each group best."""
        return {
            group: max(range(len(self.pool)), key=lambda number: self.suits[group][self.pool[number]])
            for group in self.suits
        }


MIXES = {
    "a lookup suits reading": Mix(
        ("eagle", LOOKUP),
        {
            "chat": {"eagle": 0.8, LOOKUP: 0.05},
            "reasoning": {"eagle": 0.7, LOOKUP: 0.2},
            "reading": {"eagle": 0.35, LOOKUP: 0.9},
        },
    ),
    "two models suit one group each": Mix(
        ("eagle", "draft"),
        {
            "chat": {"eagle": 0.85, "draft": 0.3},
            "reasoning": {"eagle": 0.3, "draft": 0.85},
            "reading": {"eagle": 0.6, "draft": 0.6},
        },
    ),
}


def draw_by_category(recording: Recording, mix: Mix, seed: int) -> Recording:
    """Make a recording in which acceptance and hits of lookups are drawn by the group of each answer's prompt."""
    depth, proposed, confidence = recording.depth.copy(), recording.proposed.copy(), recording.confidence.copy()
    group = np.repeat(recording.group, np.diff(recording.start))  # (positions,)
    for number, full in enumerate(recording.drafters):
        name = full.partition("/")[0]
        for place, label in enumerate(recording.groups):
            share, rows = mix.suits[label].get(name), group == place
            if share is not None and name == LOOKUP:
                lookups = _lookups(int(rows.sum()), share, np.random.default_rng([seed, place]))
                depth[number, rows], proposed[number, rows], confidence[number, rows] = lookups
            elif share is not None:
                depth[number, rows] = lift(recording, share, seed).depth[number, rows]
    return replace(recording, depth=depth, proposed=proposed, confidence=confidence)


def _lookups(
    count: int, share: float, rng: np.random.Generator
) -> tuple[NDArray[np.int8], NDArray[np.int8], NDArray[np.int8]]:
    """Draw (depth, proposed, confidence) of `count` lookups, of which `share` find a match."""
    has_match = rng.random(count) < share
    right = (rng.random((count, DEPTH)) < COPIES).cumprod(1).sum(1)
    confidence = np.where(has_match, MATCH_TOKENS, 0).astype(np.int8)
    return (
        np.where(has_match, right, 0).astype(np.int8),
        np.where(has_match, DEPTH, 0).astype(np.int8),
        np.repeat(confidence[:, None], DEPTH, axis=1),
    )
