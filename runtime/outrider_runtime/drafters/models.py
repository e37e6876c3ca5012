"""What is known of a draft and its target before either is loaded, and what holds for every drafter with a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider_runtime.model_config import CONFIG_FILE, Config, UnreadableConfigError

TOKENIZER_FILE = "tokenizer.json"
Count = Annotated[int, Field(gt=0)]


class _Read(BaseModel):
    """Fields of a config.json as their publishers name them; what else stands there is the engine's to read."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class EagleConfig(_Read):
    """Where NVIDIA's heads keep their layer ids."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class ModelConfig(_Read):
    """What is read of a draft's config, and of its target's."""

    architectures: list[str] | None = None
    speculators_model_type: str | None = None
    vocab_size: Count | None = None
    hidden_size: Count | None = None
    num_hidden_layers: Count | None = None
    max_position_embeddings: int | None = None
    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    eagle_config: EagleConfig | None = None
    medusa_num_heads: Count | None = None
    pard_token: int | None = None
    ptd_token_id: int | None = None
    transformer_layer_config: dict[str, Any] | None = None
    """Where the speculators format keeps sizes and vocabulary."""

    @property
    def names(self) -> str:
        return ", ".join(self.architectures or []) or "no architecture"

    @property
    def is_head(self) -> bool:
        """Publishers name a head Eagle3 or like any model of its family; a draft_vocab_size is what only heads have."""
        names = " ".join([*(self.architectures or []), self.speculators_model_type or ""])
        return "eagle" in names.lower() or self.draft_vocab_size is not None

    @property
    def drafts_in_parallel(self) -> str:
        """Name of the parallel format (P-EAGLE, PARD) that the checkpoint is trained for; empty for others."""
        names = " ".join([*(self.architectures or []), self.speculators_model_type or ""]).lower()
        if "peagle" in names:
            return "P-EAGLE"
        if self.pard_token is None and self.ptd_token_id is None:
            return ""
        return "P-EAGLE" if "eagle" in names or self.draft_vocab_size is not None else "PARD"

    @property
    def layer_ids(self) -> list[int]:
        """Layers of the target that a head reads; empty where its config leaves them to the engine."""
        own = self.eagle_config and self.eagle_config.eagle_aux_hidden_state_layer_ids
        return (self.eagle_aux_hidden_state_layer_ids if own is None else own) or []


@dataclass(frozen=True, slots=True)
class Models:
    draft: ModelConfig
    target: ModelConfig
    draft_location: str
    """A folder, or the name on the hub."""
    target_location: str
    longest: int | None
    """Tokens that a request may take, where that is known."""


def typed_config(config: Config, location: str) -> ModelConfig:
    """location: of the model, for the message. Raises UnreadableConfigError, which names file and field."""
    try:
        layers = ModelConfig.model_validate(config).transformer_layer_config
        return ModelConfig.model_validate({**(layers or {}), **config})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field, value = ".".join(map(str, problem["loc"])), repr(problem["input"])[:60]
        raise UnreadableConfigError(f"{location}/{CONFIG_FILE}: {field} is {value}: {problem['msg']}") from None


def parallel_format(models: Models) -> str:
    """Why a checkpoint for parallel drafting is refused: run token by token it proposes junk after its first token."""
    name = models.draft.drafts_in_parallel
    if not name:
        return ""
    return f"the checkpoint is {name}, which drafts all tokens in parallel; vLLM's V2 runner cannot: use another draft"


def other_vocabulary(models: Models) -> str:
    """Why the draft's tokens are not the target's, in a sentence; empty when nothing is known against it."""
    sizes = models.draft.vocab_size, models.target.vocab_size
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
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return vocabulary if isinstance(vocabulary, dict) else None
