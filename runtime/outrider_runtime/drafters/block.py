"""A block drafter (DFlash, DFlash2, DSpark): one pass over the target's hidden states proposes a block of tokens.

It caches keys and values of the context. They cost a projection of each token and no pass, so feeding it is nearly
free. Hidden states are not kept after their step, so a KV gap cannot be filled, and proposals over a gap are useless.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_crds.spec import Backend

from outrider_runtime.drafters.draft_configs import (
    ModelPair,
    other_vocabulary,
    other_width,
    too_few_positions,
    too_many_tokens,
    unserved,
)
from outrider_runtime.drafters.method import Method

SERVED_KINDS = ("DFlash", "DFlash2", "DSpark")


class BlockCheckpoint(NamedTuple):
    """Properties of a block drafter that its checkpoint decides."""

    kind: str
    """DFlash, DFlash2 or DSpark."""
    tokens: int
    """Most tokens that it proposes for a request in its pass."""


def obstacle(models: ModelPair) -> str:
    kind = models.draft.block_kind
    if kind not in SERVED_KINDS:
        served = ", ".join(SERVED_KINDS)
        no_block = f"the model is no block drafter that is served ({served}): its config names {models.draft.names}"
        return unserved(models) or no_block
    return (
        _other_form(models)
        or _other_mask(models)
        or _other_block(models)
        or too_few_positions(models.draft.max_position_embeddings, models.longest)
        or other_vocabulary(models)
        or too_many_tokens(models)
        or other_width(models, f"{kind} draft")
        or _other_depth(models)
        or _layers_beyond(models)
        or _beyond_block(models)
    )


def _other_form(models: ModelPair) -> str:
    """Refuse variants that vLLM 0.32 does not know, and would run as another one."""
    projector = models.draft.dflash_config and models.draft.dflash_config.projector_type
    if projector == "domino":
        return "the draft's projector_type is domino, which vLLM does not serve: use another draft"
    markov = models.draft.markov_head_type
    if markov in (None, "vanilla"):
        return ""
    return f"the draft's markov_head_type is {markov}, and vanilla alone is served: use another draft"


def _other_mask(models: ModelPair) -> str:
    """Refuse a draft whose block has no token for open places, or one that its embedding lacks.

    A GPU reads behind the embedding then, which ends the engine.
    """
    draft, tokens = models.draft, models.target.vocab_size
    nested = None if draft.dflash_config is None else draft.dflash_config.mask_token_id
    masks = [mask for mask in (nested, draft.mask_token_id, draft.dspark_noise_token_id) if mask is not None]
    if not masks:
        return "the draft's config has no mask_token_id: save or download it again, whole"
    beyond = [mask for mask in masks if mask < 0 or (tokens is not None and mask >= tokens)]
    return f"the draft's mask_token_id is {beyond[0]}, and the target has {tokens} tokens" if beyond else ""


def _other_block(models: ModelPair) -> str:
    """Refuse sizes with which the draft proposes nothing."""
    draft = models.draft
    candidates = None if draft.dflash_config is None else draft.dflash_config.selector_top_k
    if draft.block_tokens is not None and draft.block_tokens < 1:
        return "the draft's block_size leaves no token to propose: save or download it again, whole"
    if candidates is not None and candidates < 1:
        return f"the draft's selector_top_k is {candidates}, and must be above 0: save or download it again, whole"
    return ""


def _other_depth(models: ModelPair) -> str:
    expected, layers = models.draft.num_target_layers, models.target.num_hidden_layers
    if expected is None or layers is None or expected == layers:
        return ""
    return f"the draft is made for a target of {expected} layers (num_target_layers), the target has {layers}"


def _layers_beyond(models: ModelPair) -> str:
    """Refuse a draft that reads layers which the target lacks.

    Publishers count the target's layers from 0; the speculators format counts from 1, and 0 is the embedding.
    """
    layers, draft = models.target.num_hidden_layers, models.draft
    nested = draft.dflash_config and draft.dflash_config.target_layer_ids
    from_0 = nested or draft.target_layer_ids or []
    read = draft.aux_hidden_state_layer_ids or [number + 1 for number in from_0]
    beyond = [number for number in read if layers is not None and not 0 <= number <= layers]
    return f"the draft reads hidden states after layer {beyond[0]}, the target has {layers} layers" if beyond else ""


def _beyond_block(models: ModelPair) -> str:
    tokens, most = models.max_tokens, models.draft.block_tokens
    if tokens is None or most is None or tokens <= most:
        return ""
    return f"block.maxTokens is {tokens}, and the checkpoint's block proposes {most} tokens: lower it"


METHOD = Method(
    needs_kv=True,
    needs_hidden=True,
    obstacle=obstacle,
    unsupported={Backend.TORCH: "Unsupported: the Torch backend has no block drafters; use engine.backend vLLM"},
)
