"""Prompt lookup beside a neural drafter: proposes the tokens that followed the same n-gram earlier in the request.

vLLM has the search (compiled with numba) but hosts it only as the engine's one drafter; here it runs for the
requests that the controller chose it for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class PromptLookupHost:
    def __init__(self, *, min_tokens: int, max_tokens: int, max_model_len: int) -> None:
        # Not at the top: numba must not be imported before vLLM has replaced its kernels (it looks at the insides of
        # every module then, and falls over those of llvmlite).
        from vllm.v1.spec_decode import ngram_proposer

        self._search = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.propose(np.zeros(max_tokens + 1, dtype=np.int32), (), 1)  # compiles now, not in a user's step

    def propose(self, history: Tokens, sampled: Sequence[int], draft_tokens: int) -> list[int]:
        """Up to `draft_tokens` proposals after `history` (tokens of the request) and `sampled` (of this step)."""
        tokens = np.concatenate([history, np.asarray(sampled, dtype=np.int32)]) if len(sampled) else history
        found: Tokens = self._search(tokens, self.min_tokens, self.max_tokens, self.max_model_len, draft_tokens)
        return [int(token) for token in found]
