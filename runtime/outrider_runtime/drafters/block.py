"""A block drafter (DFlash, DFlash2, DSpark): one pass over the target's hidden states proposes a block of tokens.

It also keeps keys of the context, which cost a projection of each token and no pass: being fed is nearly
free. Hidden states are gone after their step, so a KV gap stays, and over a gap it proposes junk.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_crds.spec import Backend

from outrider_runtime.drafters.draft_configs import Models, other_vocabulary, other_width, too_many_tokens
from outrider_runtime.drafters.method import Method

SERVED_KINDS = ("DFlash", "DFlash2", "DSpark")


class BlockCheckpoint(NamedTuple):
    """What its checkpoint makes of a block drafter."""

    kind: str
    """DFlash, DFlash2 or DSpark."""
    tokens: int
    """Tokens that it proposes for a request in its pass, at most."""


def obstacle(models: Models) -> str:
    kind = models.draft.block_kind
    if kind not in SERVED_KINDS:
        served = ", ".join(SERVED_KINDS)
        return f"the model is no block drafter that is served ({served}): its config names {models.draft.names}"
    return (
        _other_form(models)
        or _without_mask(models)
        or other_vocabulary(models)
        or too_many_tokens(models)
        or other_width(models, f"{kind} draft")
        or _other_depth(models)
        or _layers_beyond(models)
        or _beyond_block(models)
    )


def _other_form(models: Models) -> str:
    """Variants that vLLM 0.32 does not know, and would run as something else."""
    projector = models.draft.dflash_config and models.draft.dflash_config.projector_type
    if projector == "domino":
        return "the draft's projector_type is domino, which vLLM does not serve: use another draft"
    markov = models.draft.markov_head_type
    if markov in (None, "vanilla"):
        return ""
    return f"the draft's markov_head_type is {markov}, and vanilla alone is served: use another draft"


def _without_mask(models: Models) -> str:
    draft = models.draft
    nested = draft.dflash_config and draft.dflash_config.mask_token_id
    if any(token is not None for token in (nested, draft.mask_token_id, draft.dspark_noise_token_id)):
        return ""
    return "the draft's config has no mask_token_id: save or download it again, whole"


def _other_depth(models: Models) -> str:
    made_for, has = models.draft.num_target_layers, models.target.num_hidden_layers
    if made_for is None or has is None or made_for == has:
        return ""
    return f"the draft is made for a target of {made_for} layers (num_target_layers), the target has {has}"


def _layers_beyond(models: Models) -> str:
    """Publishers count the target's layers from 0; the speculators format counts from 1, and 0 is the embedding."""
    layers, draft = models.target.num_hidden_layers, models.draft
    nested = draft.dflash_config and draft.dflash_config.target_layer_ids
    from_0 = nested or draft.target_layer_ids or []
    read = draft.aux_hidden_state_layer_ids or [number + 1 for number in from_0]
    beyond = [number for number in read if layers is not None and not 0 <= number <= layers]
    return f"the draft reads hidden states after layer {beyond[0]}, the target has {layers} layers" if beyond else ""


def _beyond_block(models: Models) -> str:
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
