"""The configs of a draft and its target, read before either is loaded, and the checks that several methods share."""

from __future__ import annotations

import json
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider_runtime.model_config import CONFIG_FILE, Config, UnreadableConfigError

TOKENIZER_FILE = "tokenizer.json"
_NOT_EAGLE_1 = frozenset(("d2t", "t2d", "hidden_norm.weight", "norm.weight"))
"""Tensors of EAGLE-3 heads and block drafts; an EAGLE-1 head has no norm of its own."""
Count = Annotated[int, Field(gt=0)]
MTP_FIELDS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules")
"""Fields that count MTP modules, in the order in which they are read."""
TARGET_FIELDS = frozenset((
    "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings",
    "model_type", *MTP_FIELDS, "mtp_config", "text_config",
))  # fmt: skip
"""The fields of a target's config.json that are read."""
STATE_LAYERS = frozenset(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"))
"""Entries of `layer_types` for layers that keep a state."""
STATE_FIELDS = ("state_size", "ssm_state_size", "mamba_d_state", "linear_attn_config")
"""Fields that only models with a state have (Mamba, Jamba, Nemotron-H, Falcon-H1, Kimi Linear), some of which have no
`layer_types`."""


class _ConfigFile(BaseModel):
    """Fields of a config.json, under their publishers' names; other fields are left to the engine."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class EagleConfig(_ConfigFile):
    """The section in which NVIDIA's heads keep their layer ids."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class DFlashConfig(_ConfigFile):
    """A block drafter's own section, which some publishers have."""

    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    block_size: int | None = None
    projector_type: str | None = None
    selector_top_k: int | None = None


class ModelConfig(_ConfigFile):
    """The fields that are read of a draft's config, and of its target's."""

    architectures: list[str] | None = None
    model_type: Any = None
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
    parallel_drafting: Any = None
    dflash_config: DFlashConfig | None = None
    mask_token_id: int | None = None
    dspark_noise_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    block_size: int | None = None
    sample_from_anchor: bool | None = None
    markov_head_type: str | None = None
    layer_types: list[str] | None = None
    state_size: Any = None
    ssm_state_size: Any = None
    mamba_d_state: Any = None
    linear_attn_config: Any = None
    num_target_layers: int | None = None
    num_nextn_predict_layers: int | None = None
    mtp_num_hidden_layers: int | None = None
    num_mtp_modules: int | None = None
    mtp_config: Any = None
    text_config: dict[str, Any] | None = None
    """Sizes of a multimodal model's language part."""
    transformer_layer_config: dict[str, Any] | None = None
    """The section in which the speculators format keeps sizes and vocabulary."""

    @property
    def names(self) -> str:
        return ", ".join(self.architectures or []) or "no architecture"

    @property
    def is_head(self) -> bool:
        """Whether the checkpoint is an EAGLE head.

        Publishers name a head Eagle3, or like any model of its family; only heads have a draft_vocab_size.
        """
        names = " ".join([*(self.architectures or []), self.speculators_model_type or ""])
        return "eagle" in names.lower() or self.draft_vocab_size is not None

    @property
    def unserved_kind(self) -> str:
        """Name of a kind of draft that no method serves; empty for other models."""
        names = " ".join([*(self.architectures or []), self.speculators_model_type or "", str(self.model_type)]).lower()
        if "mlpspeculator" in names or "mlp_speculator" in names:
            return "an MLPSpeculator"
        if "medusa" in names or self.medusa_num_heads is not None:
            return "Medusa heads, which method Medusa of the Torch backend serves"
        is_older = "eagle" in names and "eagle3" not in names and self.draft_vocab_size is None
        return "an EAGLE-1 or HASS head" if is_older and not self.drafts_in_parallel else ""

    @property
    def block_kind(self) -> str:
        """Name of the block drafter that the checkpoint is; empty for other models."""
        names = " ".join([self.speculators_model_type or "", *(self.architectures or [])]).lower()
        return next((kind for kind in ("LiLiCorr", "DFlash2", "DFlash", "DSpark") if kind.lower() in names), "")

    @property
    def block_tokens(self) -> int | None:
        """Most tokens that a block drafter proposes in its pass; None if its config does not say."""
        nested = None if self.dflash_config is None else self.dflash_config.block_size
        size = self.block_size if nested is None else nested
        if size is None:
            return None
        return size if self.samples_from_anchor else size - 1

    @property
    def samples_from_anchor(self) -> bool:
        """Whether the block's first token is a proposal, too, as in DSpark's own format; `speculators` drops it."""
        if self.sample_from_anchor is not None or self.block_kind != "DSpark":
            return bool(self.sample_from_anchor)
        return self.speculators_model_type is None

    @property
    def state(self) -> str:
        """What says that some layers keep a state (Mamba, linear attention, convolutions); empty if nothing does."""
        nested = (self.text_config or {}).get("layer_types")
        layers = self.layer_types or (nested if isinstance(nested, list) else [])
        if layers:
            return next((f"layer_types: {kind}" for kind in map(str, layers) if kind in STATE_LAYERS), "")
        return next((field for field in STATE_FIELDS if getattr(self, field) is not None), "")

    @property
    def mtp_layers(self) -> int | None:
        """Number of multi-token prediction modules in a target's checkpoint; None if its config does not say."""
        sections = (self.mtp_config, self.text_config)
        named = [getattr(self, field) for field in MTP_FIELDS]
        named += [section.get(field) for section in sections if isinstance(section, dict) for field in MTP_FIELDS]
        counts = [count for count in named if isinstance(count, int)]
        return max(counts) if counts else None

    @property
    def drafts_in_parallel(self) -> str:
        """Name of the parallel format (P-EAGLE, PARD) that the checkpoint is trained for; empty for other formats."""
        names = " ".join([*(self.architectures or []), self.speculators_model_type or ""]).lower()
        if "peagle" in names:
            return "P-EAGLE"
        if self.pard_token is None and self.ptd_token_id is None and self.parallel_drafting is not True:
            return ""
        return "P-EAGLE" if "eagle" in names or self.draft_vocab_size is not None else "PARD"

    @property
    def layer_ids(self) -> list[int]:
        """Layers of the target that a head reads; empty if its config leaves the choice to the engine."""
        own = self.eagle_config and self.eagle_config.eagle_aux_hidden_state_layer_ids
        return (self.eagle_aux_hidden_state_layer_ids if own is None else own) or []


@dataclass(frozen=True, slots=True)
class ModelPair:
    draft: ModelConfig
    target: ModelConfig
    draft_location: str
    """A folder, or the name on the hub."""
    target_location: str
    longest: int | None
    """Most tokens of a request; None if unknown."""
    tensors: AbstractSet[str] = frozenset()
    """Names of the draft's tensors; empty if they are not known."""
    max_tokens: int | None = None
    """Limit of the manifest on a block drafter's proposals, in tokens; None: the length of its block."""


def typed_config(config: Config, location: str) -> ModelConfig:
    """Validate a draft's config.json. Raises UnreadableConfigError, which names file and field.

    location: folder or hub name of the model, for the message.
    """
    try:
        layers = ModelConfig.model_validate(config).transformer_layer_config
        return ModelConfig.model_validate({**(layers or {}), **config})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field, value = ".".join(map(str, problem["loc"])), repr(problem["input"])[:60]
        raise UnreadableConfigError(f"{location}/{CONFIG_FILE}: {field} is {value}: {problem['msg']}") from None


def target_config(config: Config, location: str) -> ModelConfig:
    """Validate a target's config.json. Raises UnreadableConfigError.

    Fields of drafts are left out: a target may use their names for something else.
    """
    return typed_config({name: value for name, value in config.items() if name in TARGET_FIELDS}, location)


def parallel_format(models: ModelPair) -> str:
    """Refuse a checkpoint for parallel drafting: run token by token, only its first token is of use."""
    name = models.draft.drafts_in_parallel
    if not name:
        return ""
    return f"the checkpoint is {name}, which drafts all tokens in parallel; vLLM's V2 runner cannot: use another draft"


def unserved(models: ModelPair) -> str:
    """Refuse a kind of draft that vLLM's V2 runner has no speculator for."""
    kind = models.draft.unserved_kind or _kind_of(models.tensors)
    return f"the checkpoint is {kind}: use an EAGLE-3 head, a block draft or a draft model" if kind else ""


def _kind_of(tensors: AbstractSet[str]) -> str:
    """Name the kind of a draft whose config names the family of its target; empty for other models."""
    if "fc.weight" in tensors and not tensors & _NOT_EAGLE_1 and "layers.0.self_attn.q_proj.weight" in tensors:
        return "an EAGLE-1 or HASS head"
    return ""


def too_few_positions(has: int | None, longest: int | None) -> str:
    """Refuse a draft with fewer positions than the longest request: the engine feeds it the whole request.

    has: positions of the draft. longest: most tokens of a request.
    """
    if has is None or longest is None or has >= longest:
        return ""
    return (
        f"the draft model has {has} positions (max_position_embeddings), and a request may take {longest}: "
        "lower engine.maxModelLen, or use another draft"
    )


def other_width(models: ModelPair, kind: str) -> str:
    """Refuse a draft that reads hidden states of another width. kind: its name in the sentence."""
    other, has = models.draft.target_hidden_size, models.target.hidden_size
    field, width = ("target_hidden_size", other) if other else ("hidden_size", models.draft.hidden_size)
    if width is None or has is None or width == has:
        return ""
    return f"the {kind} reads hidden states of width {width} ({field}), the target's are {has} wide"


def too_many_tokens(models: ModelPair) -> str:
    """Refuse a draft whose own vocabulary is larger than the target's."""
    size, most = models.draft.draft_vocab_size, models.target.vocab_size
    if size is None or most is None or size <= most:
        return ""
    return f"vocabulary mismatch: the head proposes {size} tokens (draft_vocab_size), the target has {most}"


def block_drafter(models: ModelPair) -> str:
    """Refuse a block drafter's checkpoint under another method."""
    kind = models.draft.block_kind
    return f"the model is a block drafter ({kind}): use method Block for it" if kind else ""


def other_vocabulary(models: ModelPair) -> str:
    """Refuse a draft whose vocabulary differs from the target's."""
    sizes = models.draft.vocab_size, models.target.vocab_size
    if None not in sizes and sizes[0] != sizes[1]:
        return f"vocabulary mismatch: the draft has {sizes[0]} tokens and the target {sizes[1]}"
    draft, target = _tokens(models.draft_location), _tokens(models.target_location)
    if draft is None or target is None or draft == target:
        return ""
    return "vocabulary mismatch: draft and target have as many tokens, but not the same ones"


def _tokens(location: str) -> dict[str, int] | None:
    """Read the vocabulary of a model in a local folder; None if it has no tokenizer of its own (EAGLE heads)."""
    try:
        vocabulary = json.loads(Path(location, TOKENIZER_FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return vocabulary if isinstance(vocabulary, dict) else None
