"""Suffix decoding (arXiv 2411.04975): proposes what most often followed the last tokens, in the request and in earlier
answers.

The trees are those of vLLM's suffix decoding, from the library arctic-inference. They are fed when the drafter is
asked, with everything that a request got since it was last asked: a step that does not use them pays nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from outrider_crds.spec import Suffix

from outrider_runtime.vllm_plugin.model_free import History, Tokens

INSTALLATION = "pip install 'outrider[suffix]'"
MOST_WAITING_ANSWERS = 256
"""Of requests that the drafter was never asked for; each proposal takes one of them in."""
_NO_PROMPT: Tokens = np.empty(0, dtype=np.int32)


def library_obstacle() -> str:
    """Why the library cannot be used in this installation, with the remedy; empty when it can."""
    try:
        _cache_class()
    except Exception as error:  # not installed, or built for another Python or machine: its compiled part says how
        return (
            "suffix decoding needs the library arctic-inference, which cannot be loaded here "
            f"({type(error).__name__}: {error}); Outrider's own images have it, elsewhere: {INSTALLATION}"
        )
    return ""


def _cache_class() -> Any:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    return SuffixDecodingCache


class SuffixHost:
    def __init__(self, settings: Suffix, max_model_len: int) -> None:
        self._cache = _cache_class()(settings.max_tree_depth, settings.max_cached_requests)
        self._settings = settings
        self._max_model_len = max_model_len
        self._fed: dict[str, int] = {}
        """Request -> tokens of its answer that the cache has."""
        waiting = min(MOST_WAITING_ANSWERS, settings.max_cached_requests)
        self._waiting: deque[tuple[str, Tokens]] = deque(maxlen=waiting)

    def propose(self, history: History, draft_tokens: int) -> list[int]:
        self._take_in_one()
        self._feed(history)
        room = min(draft_tokens, self._max_model_len - len(history.tokens) - 1)
        if room <= 0:
            return []
        found = self._cache.speculate(
            history.request,
            history.tokens[-self._settings.max_tree_depth :],
            max_spec_tokens=room,
            max_spec_factor=self._settings.max_spec_factor_percent / 100,
            min_token_prob=self._settings.min_token_prob_percent / 100,
        )
        return list(found.token_ids)

    def finished(self, request: str, answer: Sequence[int]) -> None:
        """Later requests may want its answer, also where the drafter had no part in it."""
        fed = self._fed.pop(request, None)
        if fed is None:
            self._waiting.append((request, np.asarray(answer, dtype=np.int32)))
            return
        self._cache.add_active_response(request, np.asarray(answer[fed:], dtype=np.int32))
        self._cache.stop_request(request)

    def _feed(self, history: History) -> None:
        answer = history.tokens[history.prompt_tokens :]
        if history.request not in self._fed:
            self._cache.start_request(history.request, history.tokens[: history.prompt_tokens])
            self._fed[history.request] = 0
        self._cache.add_active_response(history.request, answer[self._fed[history.request] :])
        self._fed[history.request] = len(answer)

    def _take_in_one(self) -> None:
        """One at a time: a step that finds many of them does not wait for all."""
        if not self._waiting:
            return
        request, answer = self._waiting.popleft()
        self._cache.start_request(request, _NO_PROMPT)
        self._cache.add_active_response(request, answer)
        self._cache.stop_request(request)
