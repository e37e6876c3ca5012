"""Tokens and text: the model's tokenizer, its chat template, and what its folder says of ends and of sampling."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outrider_runtime.model_config import CONFIG_FILE, gguf_file
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.openai_requests import GenerationRequest

GENERATION_FILE = "generation_config.json"
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
CONTEXT_TOKENS = 6
"""Of the prompt, that a piece of text may hang on: whether it begins with a space."""
_OPTIONS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
NOT_FOR_TEMPLATES = (_OPTIONS | {"messages"}) - {"add_generation_prompt", "kwargs"}
"""What the call itself is told. A request must not set it: a template is a program."""


class Text:
    def __init__(self, folder: Path, vocabulary: int) -> None:
        """vocabulary: rows of the model's embedding. Raises UnsupportedModelError."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **gguf_file(folder))
            self._backend: Tokenizer = self._tokenizer.backend_tokenizer
            # The first call may change the tokenizer's own settings, which must not happen beside another one.
            self.encode("")
        except Exception as error:  # its reader raises whatever broken files make it stumble over
            raise UnsupportedModelError(f"{folder} has no tokenizer that can be used: {error}") from None
        words = self._backend.get_vocab(with_added_tokens=True)
        self.longest_token = max(map(len, words), default=1)
        """Characters."""
        largest = max(words.values(), default=-1)
        if largest >= vocabulary:
            raise UnsupportedModelError(
                f"{folder / 'tokenizer.json'} has a token {largest}, and vocab_size in {CONFIG_FILE} is {vocabulary}: "
                "the tokenizer is another model's"
            )
        self.defaults = _defaults(folder / GENERATION_FILE)
        """What the model's makers sample with, where a request says nothing."""
        ends = _ends(folder / GENERATION_FILE) or _ends(folder / CONFIG_FILE)
        self.end_tokens = ends | {self._tokenizer.eos_token_id} - {None}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        tokens: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return tokens

    def render_chat(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """variables: of the template, none of them NOT_FOR_TEMPLATES. Raises ValueError where the model has no chat
        template, or its template refuses the messages."""
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **variables)
        except Exception as error:  # templates are programs: they raise what they like
            raise ValueError(f"the chat template cannot render the messages: {error}") from None
        return text

    def token(self, number: int) -> str:
        """As it stands in a text."""
        return self._backend.decode([number], skip_special_tokens=False)

    def detokenizer(self, prompt: Sequence[int]) -> Pieces:
        return Pieces(self._backend, prompt)


class Pieces:
    """An answer's text, token by token; a token that leaves a character incomplete adds nothing yet."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._untold: list[int] = []
        """Tokens whose text has not gone out."""
        for token in prompt[-CONTEXT_TOKENS:]:  # its last character may be incomplete: the answer may go on with it
            self.step(token)

    def step(self, token: int) -> str:
        self._untold.append(token)
        try:
            text = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # bytes that are no character beside some that were one: no class of its own
            text = self._tokenizer.decode(self._untold, skip_special_tokens=True)
            self._stream = DecodeStream(ids=self._untold, skip_special_tokens=True)
        if text:
            self._untold = []
        return text


def _read(file: Path) -> dict[str, Any]:
    """Empty where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"{file} is not a JSON object")
    return found


def _defaults(file: Path) -> dict[str, float]:
    found = {field: value for field, value in _read(file).items() if field in DEFAULTS and value is not None}
    try:
        GenerationRequest.model_validate(found)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = problem["loc"][0]
        raise UnsupportedModelError(f"{file}: {field} is {found[str(field)]!r}: {problem['msg']}") from None
    return found


def _ends(file: Path) -> frozenset[int]:
    value = _read(file).get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(one) is int for one in tokens):
        raise UnsupportedModelError(f"{file}: eos_token_id is {value!r}, which is no token")
    return frozenset(tokens)
