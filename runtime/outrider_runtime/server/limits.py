"""Limits on values that vLLM accepts although they make the engine fail or exhaust the pod."""

from __future__ import annotations

from typing import Any

from outrider_runtime.server.server_errors import RequestError

MAX_CHOICES = 128
"""Highest `n` of a request, as in OpenAI's own API. The engine runs each choice as a request."""


def check_request(body: dict[str, Any]) -> None:
    """Raise RequestError (400), naming the field, if a value is too large. vLLM checks all other types and ranges."""
    choices = body.get("n")
    if isinstance(choices, int) and choices > MAX_CHOICES:
        raise RequestError(f"n is {choices}; this service makes at most {MAX_CHOICES} choices a request", "n")
