"""Errors of requests to the API server: refusals, and no answer."""

from __future__ import annotations

import json

import aiohttp

from outrider_operator.validation.reading import items, text

UNREACHABLE = (aiohttp.ClientError, OSError)
"""Errors that a request raises if the API server cannot be reached; a TimeoutError is an OSError."""
_DENIED = "admission webhook"
"""Beginning of the message of a denied request. A webhook may choose any HTTP status for it, even 404 or 503."""


class ApiError(Exception):
    """The API server refused a request: its HTTP status, reason and sentence."""

    def __init__(self, status: int, reason: str, message: str, causes: frozenset[str] = frozenset()) -> None:
        """causes: reasons of `details.causes`."""
        super().__init__(f"{reason or 'error'} ({status}): {message}")
        self.status = status
        self.message = message
        self.not_found = status == 404
        self.forbidden = status == 403
        self.already_exists = (status, reason) == (409, "AlreadyExists")
        self.conflict = (status, reason) == (409, "Conflict")
        """True if another writer was first, or a precondition does not hold."""
        self.expired = status == 410
        """True if the resource version is too old to watch from, so that a new list is needed."""
        self.namespace_ends = "NamespaceTerminating" in causes
        """True if the namespace is being deleted: no object can be created in it any more."""
        self.busy = status in (429, 503)
        """True if the server is overloaded and asks to retry later."""


def error_of(status: int, body: str) -> ApiError:
    """The error in a response: a `Status` document of the API server, or any body of a proxy in front of it."""
    try:
        document = json.loads(body)
        reason, message = str(document.get("reason", "")), str(document.get("message", ""))
        causes = frozenset(text(cause, "reason") for cause in items(document, "details", "causes"))
    except (ValueError, AttributeError):
        return ApiError(status, "", body[:200])
    if message.startswith(_DENIED):
        return ApiError(403, "Forbidden", message)
    return ApiError(status, reason, message, causes)
