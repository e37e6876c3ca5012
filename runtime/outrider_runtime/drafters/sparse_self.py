"""Sparse self-speculation (MagicDec, after StreamingLLM): the target drafts for itself over the first tokens of a
request and its last ones.

It uses the target's weights and the target's KV, so it needs no prefill, no cache and no catch-up. Each token is a pass
of the target over a bounded context: it pays where contexts are long, and KV is what a step reads.
"""

from __future__ import annotations

from outrider_crds.spec import Backend

from outrider_runtime.drafters.method import Method

METHOD = Method(
    passes=True,
    unsupported={Backend.TORCH: "Unsupported: the Torch backend has no SparseSelf; use engine.backend vLLM"},
)
