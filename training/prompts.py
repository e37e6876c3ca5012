"""Prompts from a file, split into those for training and those for validation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from training.target import CannotTrainError

DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.txt"
HELD_OUT = 32  # prompts for validation alone


def read_prompts(file: Path) -> list[str]:
    """Read a prompt from each line. A line in JSON has it in `turns` (Spec-Bench; its first) or `prompt`."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CannotTrainError(f"--prompts {file} cannot be read: {error}") from None
    prompts = [parse_prompt(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line]
    if len(prompts) < 2:
        raise CannotTrainError(
            f"--prompts {file} has {len(prompts)} prompts; at least two are needed, since one is held out."
        )
    return prompts


def parse_prompt(line: str, place: str) -> str:
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


def split_prompts(prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the prompts to train on, and at most HELD_OUT for validation, spread evenly over the file."""
    stride = max(min(8, len(prompts)), math.ceil(len(prompts) / HELD_OUT))
    held_out = list(prompts[::stride])
    return [prompt for prompt in prompts if prompt not in set(held_out)], held_out
