"""A smaller model of the same vocabulary: a pass a token, over a cache of its own.

Over a gap in that cache it proposes junk. Measured on SmolLM2, k = 2, accepted per trial: the target as its own draft
falls from 1.00 to 0.73 after 16 skipped steps and to 0.60 after 40, and it stays there until the gap is closed; then
it is 1.00 again.
"""

from __future__ import annotations

from outrider_runtime.drafters.draft_configs import Models, block_drafter, other_vocabulary, parallel_format
from outrider_runtime.drafters.method import Method


def obstacle(models: Models) -> str:
    other_method = parallel_format(models) or block_drafter(models)
    if other_method:
        return other_method
    if models.draft.is_head:
        return f"the model is an EAGLE head ({models.draft.names}), not a draft model; use method Eagle for it"
    return other_vocabulary(models) or too_few_positions(models.draft.max_position_embeddings, models.longest)


def too_few_positions(has: int | None, longest: int | None) -> str:
    """The engine feeds a draft model as far as the target reads, past the draft's own last position too.

    has: positions of the draft. longest: tokens that a request may take.
    """
    if has is None or longest is None or has >= longest:
        return ""
    return (
        f"the draft model has {has} positions (max_position_embeddings), and a request may take {longest}: "
        "lower engine.maxModelLen, or use another draft"
    )


METHOD = Method(passes=True, needs_kv=True, beams=True, obstacle=obstacle)
