"""What is known of a draft and its target before either is loaded, and what holds for every drafter with a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from outrider_runtime.model_config import Config

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Models:
    draft: Config
    target: Config
    draft_location: str
    """A folder, or the name on the hub."""
    target_location: str
    longest: int | None
    """Tokens that a request may take, where that is known."""


def config_of_layers(config: Config) -> Config:
    """`config` with what the speculators format keeps one level deeper: sizes and vocabulary."""
    return {**(config.get("transformer_layer_config") or {}), **config}


def architectures(config: Config) -> str:
    return ", ".join(config.get("architectures") or []) or "no architecture"


def is_head(config: Config) -> bool:
    """Publishers name a head Eagle3 or like any model of its family; a draft_vocab_size is what only heads have."""
    names = " ".join([*(config.get("architectures") or []), str(config.get("speculators_model_type") or "")])
    return "eagle" in names.lower() or config.get("draft_vocab_size") is not None


def positions(config: Config) -> int | None:
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def other_vocabulary(models: Models) -> str:
    """Why the draft's tokens are not the target's, in a sentence; empty when nothing is known against it."""
    sizes = models.draft.get("vocab_size"), models.target.get("vocab_size")
    if None not in sizes and sizes[0] != sizes[1]:
        return f"vocabulary mismatch: the draft has {sizes[0]} tokens and the target {sizes[1]}"
    draft, target = _tokens(models.draft_location), _tokens(models.target_location)
    if draft is None or target is None or draft == target:
        return ""
    return "vocabulary mismatch: draft and target have as many tokens, but not the same ones"


def _tokens(location: str) -> dict[str, int] | None:
    """Token text -> id of a model in a local folder; None where it has no tokenizer of its own (EAGLE heads)."""
    try:
        vocabulary = json.loads(Path(location, TOKENIZER_FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return vocabulary if isinstance(vocabulary, dict) else None
