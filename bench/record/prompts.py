"""Prompts in three groups, by Spec-Bench's categories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

GROUPS = {
    "chat": ("writing", "roleplay", "stem", "humanities", "qa", "translation"),
    "reasoning": ("reasoning", "math", "math_reasoning", "coding"),
    "reading": ("extraction", "summarization", "rag"),
}
"""Group -> categories. `reading` answers from a text in the prompt."""


def read_groups(path: Path, count: int) -> dict[str, list[str]]:
    """Read `count` prompts of each group, taking its categories in turn.

    path: JSON lines with `category` and `turns`, in Spec-Bench's form. Raises ValueError if a group has too few.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    groups = {}
    for group, categories in GROUPS.items():
        texts = [[line["turns"][0] for line in lines if line["category"] == category] for category in categories]
        groups[group] = list(_in_turn(texts))[:count]
        if len(groups[group]) < count:
            raise ValueError(f"{path} has {len(groups[group])} prompts of {', '.join(categories)}; {count} are needed")
    return groups


def _in_turn(lists: list[list[str]]) -> Iterator[str]:
    for place in range(max(map(len, lists), default=0)):
        for texts in lists:
            if place < len(texts):
                yield texts[place]
