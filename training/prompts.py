"""Prompts that the target answers: read from a file, and split into those to train on and those to validate on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from training.target import CannotTrainError

DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.txt"
HELD_OUT = 32  # prompts that are only validated on


def read_prompts(file: Path) -> list[str]:
    """One prompt a line; or a JSON object a line, with the prompt in `turns` (Spec-Bench; its first) or `prompt`."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CannotTrainError(f"--prompts {file} cannot be read: {error}") from None
    prompts = [prompt_of(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line]
    if len(prompts) < 2:
        raise CannotTrainError(f"--prompts {file} has {len(prompts)} prompts; two are the least: one is held out.")
    return prompts


def prompt_of(line: str, place: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        record = json.loads(line)
        prompt = record["turns"][0] if "turns" in record else record["prompt"]
    except (ValueError, LookupError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise CannotTrainError(f"{place}: a JSON line needs the prompt as `turns: [...]` or `prompt`.")
    return prompt


def split(prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Prompts to train on, and at most HELD_OUT spread evenly over the file that are only validated on."""
    stride = max(min(8, len(prompts)), math.ceil(len(prompts) / HELD_OUT))
    held_out = list(prompts[::stride])
    return [prompt for prompt in prompts if prompt not in set(held_out)], held_out
