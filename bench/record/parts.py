"""A recording in parts of a batch of prompts, so that hours of work can be done piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from outrider_runtime.simulate.recording import Recording, Trees

SAMPLED = 0.7
ONE_IN = 3
"""Every third prompt is answered at the temperature SAMPLED, the others greedily."""
BATCH = 16


@dataclass(frozen=True, slots=True)
class Part:
    group: str
    temperature: float
    number: int
    prompts: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.group}-{self.temperature}-{self.number}"

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.npz"


def parts(groups: Mapping[str, Sequence[str]]) -> Iterator[Part]:
    """Split the prompts into parts; each prompt is in one."""
    for group, prompts in groups.items():
        greedy = [prompt for place, prompt in enumerate(prompts) if place % ONE_IN]
        for temperature, chosen in ((0.0, greedy), (SAMPLED, prompts[::ONE_IN])):
            for start in range(0, len(chosen), BATCH):
                yield Part(group, temperature, start // BATCH, tuple(chosen[start : start + BATCH]))


def join_recordings(recordings: Sequence[Recording], groups: tuple[str, ...]) -> Recording:
    """Concatenate recordings of the same drafters. groups: all groups, in the order of their numbers."""
    starts = np.cumsum([0, *(recording.start[-1] for recording in recordings)])
    numbers = [np.array([groups.index(name) for name in recording.groups], np.int16) for recording in recordings]
    return Recording(
        drafters=recordings[0].drafters,
        groups=groups,
        group=np.concatenate([number[recording.group] for number, recording in zip(numbers, recordings, strict=True)]),
        temperature=np.concatenate([recording.temperature for recording in recordings]),
        prompt_tokens=np.concatenate([recording.prompt_tokens for recording in recordings]),
        start=np.concatenate(
            [[0], *(recording.start[1:] + at for recording, at in zip(recordings, starts[:-1], strict=True))]
        ).astype(np.int32),
        depth=np.concatenate([recording.depth for recording in recordings], axis=1),
        proposed=np.concatenate([recording.proposed for recording in recordings], axis=1),
        confidence=np.concatenate([recording.confidence for recording in recordings], axis=1),
        trees={name: join_trees([recording.trees[name] for recording in recordings]) for name in recordings[0].trees},
    )


def join_trees(trees: Sequence[Trees]) -> Trees:
    parts = ("parent", "confidence", "on_path")
    return Trees(*(np.concatenate([getattr(tree, part) for tree in trees]) for part in parts))
