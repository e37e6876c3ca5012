"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens.

It is one search in a step, however long the proposal. Its confidence is the length of the match.
"""

from __future__ import annotations

from outrider_runtime.drafters.method import Method

METHOD = Method()
