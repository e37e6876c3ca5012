"""Texts that pods, users and other controllers wrote: one line that no terminal obeys, as long as the API takes.

A text is made fit where a model takes it, so no pod's report is too long for the status, or steers a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erasing
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC and others: a window's title, the clipboard
    r"|\x1b.?|[\x80-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]",  # C1, and what reverses the order of letters
    re.DOTALL,
)
_C0 = re.compile(r"[\x00-\x1f\x7f]")  # line ends and tabs among them part words


def cut(text: str, limit: int = 256) -> str:
    """`text` on one line without control characters, cut to `limit` characters as the CRD requires."""
    line = " ".join(_C0.sub(" ", _CONTROL.sub("", text)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _fitting(limit: int) -> BeforeValidator:
    return BeforeValidator(lambda value: cut(value, limit) if isinstance(value, str) else value)


Text = Annotated[str, Field(max_length=256), _fitting(256)]
"""A name or a figure."""
Message = Annotated[str, Field(max_length=2048), _fitting(2048)]
"""Sentences."""


def name_some(names: Sequence[str], most: int) -> str:
    """Name the first `most`, and say how many there are besides: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
