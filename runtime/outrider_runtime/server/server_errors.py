"""Errors of the server: one that clients of the OpenAI API see, and one that ends the process at its start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus


class StartupError(Exception):
    """The server cannot start. The message says what is wrong, where, and what to do; no traceback is shown."""


@dataclass(eq=False)  # not frozen: Python sets the traceback of an exception that passes a context manager
class RequestError(Exception):
    """A request is refused before it reaches the engine."""

    message: str
    param: str | None = None
    """The field that is at fault, if it is one field."""
    status: HTTPStatus = HTTPStatus.BAD_REQUEST
    kind: str = ""
    """The error document's `type`; empty: derived from the status, for example "BadRequestError"."""

    def body(self) -> bytes:
        """Return the OpenAI-style error document, of the same shape as the engine's own errors."""
        status_name = self.status.phrase.title().replace(" ", "").removesuffix("Error")  # BadRequest, NotFound, ...
        error = {
            "message": self.message,
            "type": self.kind or f"{status_name}Error",
            "param": self.param,
            "code": self.status.value,
        }
        return json.dumps({"error": error}).encode()
