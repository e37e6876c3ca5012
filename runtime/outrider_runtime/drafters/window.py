"""A bounded context, in whole pages of the KV cache: the first and the last tokens of each request.

StreamingLLM introduced it; MagicDec uses it for drafting.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_crds.draft_pool import SINK_TOKENS, DrafterSpec


class Window(NamedTuple):
    sink_tokens: int
    """Tokens at the start of a request that each pass reads."""
    window_tokens: int
    """Tokens at its end that each pass reads."""

    def sink_pages(self, page_tokens: int) -> int:
        return -(-self.sink_tokens // page_tokens)

    def window_pages(self, page_tokens: int) -> int:
        """Return the number of pages that the last tokens may lie in; the last page is partly filled."""
        return 1 + -(-(self.window_tokens - 1) // page_tokens)

    def budget(self, page_tokens: int) -> int:
        """Return the tokens that a pass reads on average, with the last page half full."""
        return (self.sink_pages(page_tokens) + self.window_pages(page_tokens)) * page_tokens - page_tokens // 2


def window_of(drafter: DrafterSpec) -> Window | None:
    """Return a drafter's window; None if it reads the whole request, or none of it."""
    if drafter.sparse_self is not None:
        return Window(drafter.sparse_self.sink_tokens, drafter.sparse_self.window_tokens)
    if drafter.draft_model is not None and drafter.draft_model.window_tokens is not None:
        return Window(SINK_TOKENS, drafter.draft_model.window_tokens)
    return None
