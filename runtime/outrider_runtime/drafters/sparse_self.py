"""Sparse self-speculation (MagicDec, after StreamingLLM): the target drafts for itself over a bounded context.

The context is the first tokens of a request and its last ones. Weights and KV are the target's, so it needs no prefill,
no cache and no catch-up. Each token is a pass of the target. It pays for long contexts, if reading KV dominates a step.
"""

from __future__ import annotations

from outrider_crds.spec import Backend

from outrider_runtime.drafters.method import Method

METHOD = Method(
    autoregressive=True,
    unsupported={Backend.TORCH: "Unsupported: the Torch backend has no SparseSelf; use engine.backend vLLM"},
)
