"""What drafters proposed at every position of real answers, and how far the target agreed: recorded once, no text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DEPTH = 8
"""Longest proposal that was recorded."""
LOG_ODDS = 12.0
"""Confidences are log-odds within plus and minus this, in 8 bits."""


def quantised(log_odds: NDArray[np.floating]) -> NDArray[np.int8]:
    return np.asarray(np.clip(np.rint(log_odds * (127 / LOG_ODDS)), -127, 127), np.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Columns over positions; the answers' positions follow one another."""

    drafters: tuple[str, ...]
    """`NAME/COVERAGE` is drafter NAME where its cache covers less than the whole text."""
    groups: tuple[str, ...]
    group: NDArray[np.int16]
    """(answers,) of the answer's prompt."""
    temperature: NDArray[np.float32]
    """(answers,)"""
    prompt_tokens: NDArray[np.int32]
    """(answers,)"""
    start: NDArray[np.int32]
    """(answers + 1,) where each answer's positions begin."""
    depth: NDArray[np.int8]
    """(drafters, positions) leading proposals that the target agreed with, DEPTH at most."""
    proposed: NDArray[np.int8]
    """(drafters, positions) proposals that there were: 0 where a lookup found nothing."""
    confidence: NDArray[np.int8]
    """(drafters, positions, DEPTH) what the drafter says of itself: a model's log-odds (`quantised`), a lookup's length
    of match."""

    @property
    def answers(self) -> int:
        return len(self.group)

    def save(self, path: Path) -> None:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        np.savez_compressed(path, drafters=np.array(self.drafters), groups=np.array(self.groups), **arrays)


_ARRAYS = ("group", "temperature", "prompt_tokens", "start", "depth", "proposed", "confidence")


def load(path: Path) -> Recording:
    """Raises OSError where there is no such file, ValueError where it is no recording."""
    with np.load(path, allow_pickle=False) as file:
        missing = {"drafters", "groups", *_ARRAYS} - set(file.files)
        if missing:
            raise ValueError(f"{path} is no recording: it lacks {', '.join(sorted(missing))}")
        drafters, groups = (tuple(map(str, file[name])) for name in ("drafters", "groups"))
        return Recording(drafters, groups, *(file[name] for name in _ARRAYS))
