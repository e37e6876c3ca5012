"""One-line texts of errors, for the state and for reasons."""

from __future__ import annotations

import re

from pydantic import ValidationError

MAX_CHARACTERS = 300
"""Length of a text; a state has one for each drafter."""

_URI = re.compile(r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^\s'"]*@)?(?P<place>[^\s'"?#]*)[^\s'"]*""")


def without_secrets(text: str) -> str:
    """Return the text with each URI cut to scheme, host and path: user, password and query may be credentials."""
    return _URI.sub(r"\g<scheme>\g<place>", text)


def first_line(error: Exception) -> str:
    """Return the first line of the error's text. For pydantic's errors, that is the first problem with its field."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        text = f"{place}: {problem['msg']}" if place else str(problem["msg"])
    else:
        text = str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def with_type(error: Exception) -> str:
    """Return the name of the error's type and its `first_line`, cut to `MAX_CHARACTERS`."""
    name = type(error).__name__
    text = first_line(error)
    return name if text == name else f"{name}: {text}"[:MAX_CHARACTERS]
