"""Medusa heads (Cai et al. 2024): each reads the target's last hidden state, and proposes a token of its own depth.

All heads run in one call, so a longer proposal costs almost nothing. They have no cache, since they read only the
hidden state that the step has just computed. So a step without them leaves no gap.
"""

from __future__ import annotations

from outrider_crds.spec import Backend

from outrider_runtime.drafters.draft_configs import ModelPair, other_vocabulary
from outrider_runtime.drafters.method import Method

HEADS = "medusa_num_heads"


def obstacle(models: ModelPair) -> str:
    if models.draft.medusa_num_heads is None:
        return (
            f"{models.draft_location}/config.json has no {HEADS}: it is of {models.draft.names}; method "
            "Medusa needs heads as `python -m training.medusa` writes them"
        )
    return other_vocabulary(models) or _other_width(models)


def _other_width(models: ModelPair) -> str:
    draft, target = models.draft.hidden_size, models.target.hidden_size
    if draft == target:
        return ""
    return f"{models.draft_location}/config.json: hidden_size is {draft}, the target's hidden states are {target} wide"


METHOD = Method(
    beams=True,
    obstacle=obstacle,
    unsupported={Backend.VLLM: "Unsupported: vLLM's model runner has no Medusa heads; use engine.backend Torch"},
)
