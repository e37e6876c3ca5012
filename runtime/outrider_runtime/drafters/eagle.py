"""An EAGLE-3 head: a layer over the target's hidden states, a pass a token.

Hidden states are gone after their step, so a gap stays. Measured on SmolLM2, k = 2: the head accepts 0.36 per trial
whatever was skipped, its whole prompt included. So a gap is not forbidden, and what it costs is learned.
"""

from __future__ import annotations

from outrider_runtime.drafters.draft_configs import (
    Models,
    block_drafter,
    other_vocabulary,
    other_width,
    parallel_format,
    too_many_tokens,
)
from outrider_runtime.drafters.method import Method

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def obstacle(models: Models) -> str:
    other_method = block_drafter(models)
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


def _layers_beyond(models: Models) -> str:
    layers = models.target.num_hidden_layers
    beyond = [one for one in models.draft.layer_ids if layers is not None and not 0 <= one <= layers]
    return f"the EAGLE-3 head reads layer {beyond[0]} ({LAYER_IDS}), the target has {layers} layers" if beyond else ""


METHOD = Method(passes=True, needs_hidden=True, beams=True, obstacle=obstacle)
