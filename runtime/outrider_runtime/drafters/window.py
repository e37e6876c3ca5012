"""A bounded context: what a pass of a drafter reads of each request, its first tokens and its last ones (StreamingLLM,
as MagicDec uses it), in whole pages of the KV cache."""

from __future__ import annotations

from typing import NamedTuple

from outrider_crds.spec import SINK_TOKENS, Drafter


class Window(NamedTuple):
    sink_tokens: int
    """At the beginning of a request."""
    window_tokens: int
    """At its end."""

    def sink_pages(self, page_tokens: int) -> int:
        return -(-self.sink_tokens // page_tokens)

    def window_pages(self, page_tokens: int) -> int:
        """Pages that the last tokens may lie in; the last of them is being filled."""
        return 1 + -(-(self.window_tokens - 1) // page_tokens)

    def budget(self, page_tokens: int) -> int:
        """Tokens that a pass reads on average: half of the last page is filled."""
        return (self.sink_pages(page_tokens) + self.window_pages(page_tokens)) * page_tokens - page_tokens // 2


def window_of(drafter: Drafter) -> Window | None:
    """None: it reads all of a request, or nothing."""
    if drafter.sparse_self is not None:
        return Window(drafter.sparse_self.sink_tokens, drafter.sparse_self.window_tokens)
    if drafter.draft_model is not None and drafter.draft_model.window_tokens is not None:
        return Window(SINK_TOKENS, drafter.draft_model.window_tokens)
    return None
