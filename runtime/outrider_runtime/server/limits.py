"""Values that the engine would accept and then fail on, or that would take the pod with them."""

from __future__ import annotations

from typing import Any

from outrider_runtime.server.errors import RequestError

MAX_CHOICES = 128
"""`n`, as in OpenAI's own API; the engine makes a request of each."""


def check_request(body: dict[str, Any]) -> None:
    """Raises RequestError (400) that names the field. Types and ranges that vLLM itself checks are left to it."""
    choices = body.get("n")
    if isinstance(choices, int) and choices > MAX_CHOICES:
        raise RequestError(f"n is {choices}; this service makes at most {MAX_CHOICES} choices a request", "n")
