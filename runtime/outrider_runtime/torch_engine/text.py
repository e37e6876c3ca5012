"""The model's tokenizer, chat template, end tokens and default sampling parameters."""

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
"""Last prompt tokens that the answer's first piece of text may depend on, as in whether it begins with a space."""
_OPTIONS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
NOT_FOR_TEMPLATES = (_OPTIONS | {"messages"}) - {"add_generation_prompt", "kwargs"}
"""Names that a request must not pass to its chat template: they are arguments of the rendering call itself."""


class Text:
    """Converts between text and tokens for one model."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """vocabulary: rows of the model's embedding. Raises UnsupportedModelError."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **gguf_file(folder))
            self._backend: Tokenizer = self._tokenizer.backend_tokenizer
            # The first call may change the tokenizer's own settings, so it must not run concurrently with another.
            self.encode("")
        except Exception as error:  # transformers raises a different class for each broken file
            raise UnsupportedModelError(f"{folder} has no usable tokenizer: {error}") from None
        words = self._backend.get_vocab(with_added_tokens=True)
        self.longest_token = max(map(len, words), default=1)
        """Characters of the longest token."""
        largest = max(words.values(), default=-1)
        if largest >= vocabulary:
            raise UnsupportedModelError(
                f"{folder / 'tokenizer.json'} has a token {largest}, and vocab_size in {CONFIG_FILE} is {vocabulary}: "
                "the tokenizer belongs to another model"
            )
        self.defaults = _defaults(folder / GENERATION_FILE)
        """The sampling parameters of generation_config.json, for requests that do not set them."""
        ends = _ends(folder / GENERATION_FILE) or _ends(folder / CONFIG_FILE)
        self.end_tokens = ends | {self._tokenizer.eos_token_id} - {None}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokenize. special: add the tokenizer's special tokens, such as a beginning-of-text token."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return tokens

    def render_chat(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render messages with the chat template. variables: for the template, none of them in NOT_FOR_TEMPLATES.

        Raises ValueError when the model has no chat template, or when the template refuses the messages.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **variables)
        except Exception as error:  # a template is a program that may raise anything
            raise ValueError(f"the chat template cannot render the messages: {error}") from None
        return text

    def token(self, number: int) -> str:
        """Decode a single token; special tokens keep their name."""
        return self._backend.decode([number], skip_special_tokens=False)

    def detokenizer(self, prompt: Sequence[int]) -> Pieces:
        return Pieces(self._backend, prompt)


class Pieces:
    """Decodes an answer token by token; a token that leaves a character incomplete adds no text yet."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []
        """Tokens whose text was not returned yet."""
        for token in prompt[-CONTEXT_TOKENS:]:  # the answer may complete the prompt's last character
            self.step(token)

    def step(self, token: int) -> str:
        """Return the text that this token completes."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # invalid bytes after valid ones; the tokenizer raises a plain Exception
            text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
            self._stream = DecodeStream(ids=self._pending, skip_special_tokens=True)
        if text:
            self._pending = []
        return text


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty when the file does not exist. Raises UnsupportedModelError."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise UnsupportedModelError(f"{file} is not a JSON object")
    return document


def _defaults(file: Path) -> dict[str, float]:
    """Read the default sampling parameters, and check them as those of a request. Raises UnsupportedModelError."""
    defaults = {field: value for field, value in _read(file).items() if field in DEFAULTS and value is not None}
    try:
        GenerationRequest.model_validate(defaults)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = problem["loc"][0]
        raise UnsupportedModelError(f"{file}: {field} is {defaults[str(field)]!r}: {problem['msg']}") from None
    return defaults


def _ends(file: Path) -> frozenset[int]:
    """Read the end tokens of a configuration file; empty when it names none. Raises UnsupportedModelError."""
    value = _read(file).get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in tokens):
        raise UnsupportedModelError(f"{file}: eos_token_id is {value!r}, which is not a token number")
    return frozenset(tokens)
