"""Refuses requests that cannot fit into the model's context, before their text is tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider_runtime.server.limits import MAX_CHOICES
from outrider_runtime.server.server_errors import RequestError


class Longest(NamedTuple):
    """The longest request that the model takes."""

    tokens: int
    """Tokens of prompt and answer together."""
    characters: int
    """Characters of a text: `tokens` times the longest token, so a longer text never fits."""

    def check(self, document: Mapping[str, Any]) -> None:
        """Check a request's prompts. document: parsed JSON of any shape. Raises RequestError (400) naming the field."""
        prompt, messages = document.get("prompt"), document.get("messages")
        if isinstance(messages, list) and len(messages) > self.tokens:
            raise self._refusal(f"there are {len(messages)} messages", "messages")
        is_several = isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], str | list)
        prompts = prompt if isinstance(prompt, list) and is_several else [prompt]
        if len(prompts) > MAX_CHOICES:
            sentence = f"the request has {len(prompts)} prompts; this service takes at most {MAX_CHOICES} a request"
            raise RequestError(sentence, "prompt")
        for item in prompts:
            if isinstance(item, str):
                self.check_text(item, "prompt")
            elif isinstance(item, list) and len(item) > self.tokens:
                raise self._refusal(f"the prompt has {len(item)}", "prompt")

    def check_text(self, text: str, field: str) -> None:
        """Check the length of one text. Raises RequestError (400)."""
        if len(text) > self.characters:
            raise self._refusal(f"the prompt has {len(text)} characters, which are more tokens than that", field)

    def _refusal(self, why: str, field: str) -> RequestError:
        """Build the error in OpenAI's words, which clients look for: "maximum context length"."""
        return RequestError(f"this model's maximum context length is {self.tokens} tokens; {why}", field)
