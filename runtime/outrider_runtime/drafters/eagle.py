"""An EAGLE-3 head: one layer over the target's hidden states, and one pass for each token.

Hidden states are not kept after their step, so a KV gap cannot be filled. Measured on SmolLM2 with k = 2: the
acceptance rate is 0.36 whatever was skipped, the whole prompt included. So proposals over a gap are allowed, and their
acceptance rate is learned.
"""

from __future__ import annotations

from outrider_runtime.drafters.draft_configs import (
    ModelPair,
    block_drafter,
    other_vocabulary,
    other_width,
    parallel_format,
    too_many_tokens,
    unserved,
)
from outrider_runtime.drafters.method import Method

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def obstacle(models: ModelPair) -> str:
    other_method = unserved(models) or block_drafter(models)
    if other_method:
        return other_method
    if not models.draft.is_head:
        return (
            f"the model is not an EAGLE-3 head: its config names {models.draft.names} and has no "
            "draft_vocab_size; use method DraftModel for it"
        )
    parallel = parallel_format(models)
    return (
        parallel
        or other_vocabulary(models)
        or too_many_tokens(models)
        or other_width(models, "EAGLE-3 head")
        or _layers_beyond(models)
    )


def _layers_beyond(models: ModelPair) -> str:
    layers = models.target.num_hidden_layers
    beyond = [layer for layer in models.draft.layer_ids if layers is not None and not 0 <= layer <= layers]
    return f"the EAGLE-3 head reads layer {beyond[0]} ({LAYER_IDS}), the target has {layers} layers" if beyond else ""


METHOD = Method(autoregressive=True, needs_hidden=True, beams=True, obstacle=obstacle)
