"""What is said of an error in one line, in the state and in reasons."""

from __future__ import annotations

from pydantic import ValidationError

MOST_CHARACTERS = 300


def first_line(error: Exception) -> str:
    """Of pydantic's errors the first problem, with the field and without its web address."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        text = f"{place}: {problem['msg']}" if place else str(problem["msg"])
    else:
        text = str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def with_type(error: Exception) -> str:
    """`first_line` behind the name of the error's type, cut where it is long."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"[:MOST_CHARACTERS]
