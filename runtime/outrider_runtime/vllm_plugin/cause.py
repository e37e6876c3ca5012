"""Carries the reason of an engine's end to the server, whose last line is the pod's termination message.

vLLM's engine core and its workers are processes of their own. The server only notices that one is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider_runtime.paths import RUN_DIR_VARIABLE

CAUSE_FILE = "engine-ended"
MAX_CHARACTERS = 600


@contextmanager
def note_cause(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Note an exception that ends the engine. Only the first process writes: it is nearest to the cause."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_CHARACTERS]
        with suppress(FileExistsError), Path(environ[RUN_DIR_VARIABLE], CAUSE_FILE).open("x", encoding="utf-8") as file:
            file.write(text)
        raise


def cause(run_dir: str | Path) -> str:
    """Return the reason that was noted; empty if none was."""
    try:
        return Path(run_dir, CAUSE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
