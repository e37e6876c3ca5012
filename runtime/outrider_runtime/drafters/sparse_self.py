"""Sparse self-speculation (MagicDec, after StreamingLLM): the target drafts for itself over the first tokens of a
request and its last ones.

It uses the target's weights and the target's KV, so it needs no prefill, no cache and no catch-up. Each token is a pass
of the target over a bounded context: it pays where contexts are long, and KV is what a step reads.
"""

from __future__ import annotations

from outrider_crds.spec import Backend, Drafter, SparseSelf

from outrider_runtime.drafters.method import Method


def sink_pages(settings: SparseSelf, page_tokens: int) -> int:
    return -(-settings.sink_tokens // page_tokens)


def window_pages(settings: SparseSelf, page_tokens: int) -> int:
    """Pages that the last tokens of the window may lie in; the last of them is being filled."""
    return 1 + -(-(settings.window_tokens - 1) // page_tokens)


def kv_budget(drafter: Drafter, page_tokens: int) -> int:
    """On average: half of the last page is filled."""
    assert drafter.sparse_self is not None, f"drafter {drafter.name} has no block sparseSelf"
    pages = sink_pages(drafter.sparse_self, page_tokens) + window_pages(drafter.sparse_self, page_tokens)
    return pages * page_tokens - page_tokens // 2


METHOD = Method(
    passes=True,
    kv_budget=kv_budget,
    unsupported={Backend.TORCH: "Unsupported: the Torch backend has no SparseSelf; use engine.backend vLLM"},
)
