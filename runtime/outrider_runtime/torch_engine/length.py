"""What cannot fit into the model's context, found before anything walks it or makes tokens of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider_runtime.server.limits import MAX_CHOICES
from outrider_runtime.server.server_errors import RequestError


class Longest(NamedTuple):
    """Of a request."""

    tokens: int
    """Prompt and answer."""
    characters: int
    """Of a text; more of them are more tokens than that, however long each is."""

    def check(self, document: Mapping[str, Any]) -> None:
        """document: parsed JSON, of any shape. Raises RequestError (400) that names the field."""
        prompt, messages = document.get("prompt"), document.get("messages")
        if isinstance(messages, list) and len(messages) > self.tokens:
            raise self._refusal(f"there are {len(messages)} messages", "messages")
        is_several = isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], str | list)
        prompts = prompt if isinstance(prompt, list) and is_several else [prompt]
        if len(prompts) > MAX_CHOICES:
            sentence = f"the request has {len(prompts)} prompts; this service takes at most {MAX_CHOICES} a request"
            raise RequestError(sentence, "prompt")
        for one in prompts:
            if isinstance(one, str):
                self.check_text(one, "prompt")
            elif isinstance(one, list) and len(one) > self.tokens:
                raise self._refusal(f"the prompt has {len(one)}", "prompt")

    def check_text(self, text: str, field: str) -> None:
        """Raises RequestError (400)."""
        if len(text) > self.characters:
            raise self._refusal(f"the prompt has {len(text)} characters, which are more tokens than that", field)

    def _refusal(self, why: str, field: str) -> RequestError:
        return RequestError(f"this model's maximum context length is {self.tokens} tokens; {why}", field)
