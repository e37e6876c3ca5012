"""Prompt lookup: proposes the tokens that followed the same n-gram earlier in the request.

The search is vLLM's (compiled with numba).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from outrider_crds.spec import PromptLookup

from outrider_runtime.vllm_plugin.model_free import History, Tokens


class PromptLookupHost:
    def __init__(self, settings: PromptLookup, max_model_len: int) -> None:
        # Not at the top: numba must not be imported before vLLM has replaced its kernels (it looks at the insides of
        # every module then, and falls over those of llvmlite).
        from vllm.v1.spec_decode import ngram_proposer

        self._search = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
        self._settings = settings
        self._max_model_len = max_model_len
        self._find(np.zeros(settings.max_tokens + 1, dtype=np.int32), 1)  # compiles now, not in a user's step

    def propose(self, history: History, draft_tokens: int) -> list[int]:
        return [int(token) for token in self._find(history.tokens, draft_tokens)]

    def finished(self, request: str, answer: Sequence[int]) -> None:
        """Nothing is kept of a request."""

    def _find(self, tokens: Tokens, draft_tokens: int) -> Tokens:
        found: Tokens = self._search(
            tokens, self._settings.min_tokens, self._settings.max_tokens, self._max_model_len, draft_tokens
        )
        return found
