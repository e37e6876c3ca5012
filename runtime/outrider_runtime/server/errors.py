"""Errors as clients of the OpenAI API see them, and the one that ends the process with a sentence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus


class StartupError(Exception):
    """The server cannot start. The message says what was wrong, where, and what to do; no traceback is shown."""


@dataclass(eq=False)  # not frozen: whoever lets an exception pass may set its traceback
class RequestError(Exception):
    """A request that is refused before the engine sees it."""

    message: str
    param: str | None = None
    status: HTTPStatus = HTTPStatus.BAD_REQUEST
    kind: str = ""
    """The document's `type`; empty: by the status."""

    def body(self) -> bytes:
        """The OpenAI-style error document, of the same shape as the engine's own."""
        named = self.status.phrase.title().replace(" ", "").removesuffix("Error")  # BadRequest, NotFound, ...
        error = {
            "message": self.message,
            "type": self.kind or f"{named}Error",
            "param": self.param,
            "code": self.status.value,
        }
        return json.dumps({"error": error}).encode()
