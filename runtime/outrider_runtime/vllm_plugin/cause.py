"""Why an engine ended, from the process that knows it to the server's last line, which is a pod's termination message.

vLLM's engine core and its workers are processes of their own; the server hears that one is gone, and not why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider_runtime.paths import RUN_DIR_VARIABLE

CAUSE_FILE = "engine-ended"
MOST_CHARACTERS = 600


@contextmanager
def told(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """What is raised within ends the engine. The first to tell is nearest to the cause."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST_CHARACTERS]
        with suppress(FileExistsError), Path(environ[RUN_DIR_VARIABLE], CAUSE_FILE).open("x", encoding="utf-8") as file:
            file.write(text)
        raise


def cause(run_dir: str | Path) -> str:
    """Empty where nobody told any."""
    try:
        return Path(run_dir, CAUSE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
