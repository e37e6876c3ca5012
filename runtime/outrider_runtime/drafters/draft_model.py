"""A smaller model of the same vocabulary, with a KV cache of its own: one pass for each token.

Its proposals over a KV gap are useless. Measured on SmolLM2 with k = 2 and the target as its own draft: the acceptance
rate falls from 1.00 to 0.73 after 16 skipped steps and to 0.60 after 40. It stays there until the gap is filled, and is
1.00 again then.
"""

from __future__ import annotations

from outrider_runtime.drafters.draft_configs import (
    ModelPair,
    block_drafter,
    other_vocabulary,
    parallel_format,
    too_few_positions,
    unserved,
)
from outrider_runtime.drafters.method import Method


def obstacle(models: ModelPair) -> str:
    other_method = unserved(models) or parallel_format(models) or block_drafter(models)
    if other_method:
        return other_method
    if models.draft.is_head:
        return f"the model is an EAGLE head ({models.draft.names}), not a draft model; use method Eagle for it"
    return (
        keeps_state(models.draft.state)
        or other_vocabulary(models)
        or too_few_positions(models.draft.max_position_embeddings, models.longest)
    )


def keeps_state(evidence: str) -> str:
    """Refuse a draft whose layers keep a state, which a rejected token cannot be taken out of again.

    evidence: what says so; empty if nothing does.
    """
    if not evidence:
        return ""
    return (
        f"some layers of the draft model keep a state ({evidence}), and that would hold the tokens which the target "
        "rejects: use a draft model whose layers all attend"
    )


METHOD = Method(autoregressive=True, needs_kv=True, beams=True, obstacle=obstacle)
