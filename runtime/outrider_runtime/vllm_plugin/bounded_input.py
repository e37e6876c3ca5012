"""Refuses requests whose parameters do not fit into the sampler's tables.

Each request has a row of fixed width there. Without this check vLLM's worker fails at a row that is too short, which
ends the engine. Here it is an error of the one request, for every API.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu.sample import logit_bias


class BoundedInput(InputProcessor):  # type: ignore[misc]  # vLLM is untyped here
    def process_inputs(self, *arguments: Any, **named: Any) -> Any:
        """Check a request after its words became tokens, and its stop tokens are known.

        Raises VLLMValidationError (HTTP 400), which names the field.
        """
        request = super().process_inputs(*arguments, **named)
        if request.sampling_params is not None:
            check_rows(request.sampling_params)
        return request


def check_rows(params: SamplingParams) -> None:
    """Check the parameters that the worker gets. Raises VLLMValidationError."""
    for field, tokens, room in _rows(params):
        if tokens > room:
            sentence = f"{field} takes {tokens} tokens, and the engine has room for {room}; send fewer"
            raise VLLMValidationError(sentence, parameter=field.split()[0], value=tokens)


def _rows(params: SamplingParams) -> Iterator[tuple[str, int, int]]:
    """Yield each field with its tokens, and the most tokens that its row holds."""
    yield "logit_bias", len(params.logit_bias or ()), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
    yield "allowed_token_ids", len(params.allowed_token_ids or ()), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS
    yield "bad_words", sum(map(len, params.bad_words_token_ids or ())), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    if params.min_tokens > 0:  # until then the sampler forbids them
        yield "stop_token_ids with min_tokens", len(params.all_stop_token_ids), logit_bias.MAX_NUM_STOP_TOKEN_IDS
