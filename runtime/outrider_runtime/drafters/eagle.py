"""An EAGLE-3 head: a layer over the target's hidden states, a pass a token.

Hidden states are gone after their step, so a hole stays. Measured on SmolLM2, k = 2: the head accepts 0.36 per trial
whatever was skipped, its whole prompt included. So a hole is not forbidden, and what it costs is learned.
"""

from __future__ import annotations

from outrider_runtime.drafters.method import Method
from outrider_runtime.drafters.models import Models, other_vocabulary, parallel_format

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def obstacle(models: Models) -> str:
    if not models.draft.is_head:
        return (
            f"the model is not an EAGLE-3 head: its config names {models.draft.names} and has no "
            "draft_vocab_size; use method DraftModel for it"
        )
    parallel = parallel_format(models)
    return (
        parallel
        or other_vocabulary(models)
        or _too_many_tokens(models)
        or _other_width(models)
        or _layers_beyond(models)
    )


def _too_many_tokens(models: Models) -> str:
    size, most = models.draft.draft_vocab_size, models.target.vocab_size
    if size is None or most is None or size <= most:
        return ""
    return f"vocabulary mismatch: the head proposes {size} tokens (draft_vocab_size), the target has {most}"


def _other_width(models: Models) -> str:
    """A head of another width was trained for another model."""
    other, has = models.draft.target_hidden_size, models.target.hidden_size
    field, wanted = ("target_hidden_size", other) if other else ("hidden_size", models.draft.hidden_size)
    if wanted is None or has is None or wanted == has:
        return ""
    return f"the EAGLE-3 head reads hidden states of width {wanted} ({field}), the target's are {has} wide"


def _layers_beyond(models: Models) -> str:
    layers = models.target.num_hidden_layers
    beyond = [one for one in models.draft.layer_ids if layers is not None and not 0 <= one <= layers]
    return f"the EAGLE-3 head reads layer {beyond[0]} ({LAYER_IDS}), the target has {layers} layers" if beyond else ""


METHOD = Method(passes=True, needs_hidden=True, beams=True, obstacle=obstacle)
