"""Remembers a start that did not end well, in the user's folder OUTRIDER_RUN_DIR.

If Outrider fails late, vLLM loads the model a second time. A startup probe that allows for one load ends the container
before that, so every start would end so. The next start with the same flags therefore begins with vLLM alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider_runtime.identity import engine_version
from outrider_runtime.paths import RUN_DIR_VARIABLE
from outrider_runtime.stock_server.activity import StepAsideError, survives

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_UNFINISHED = "it did not end: the process was stopped before the engine had started"


class StartRecord:
    """The file that exists from the begin of a start with Outrider until the engine has started so."""

    def __init__(self, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
        """flags: the fields of vLLM's EngineArgs. Nothing is remembered without a folder of the user's."""
        folder = environ.get(RUN_DIR_VARIABLE)
        texts = {name: _ADDRESS.sub("", repr(value)) for name, value in flags.items()}
        known = json.dumps([engine_version(), texts], sort_keys=True)
        digest = hashlib.sha256(known.encode()).hexdigest()[:12]
        self._file = Path(folder, f"start-{socket.gethostname()}-{digest}.txt") if folder else None
        self._is_begun = False

    def check(self) -> None:
        """Raise StepAsideError if an earlier start with these flags did not end well."""
        if self._file is not None and self._file.is_file():
            reason = self._file.read_text(encoding="utf-8")
            raise StepAsideError(f"the last start with these flags failed ({reason}); delete {self._file} to try again")

    def begin(self) -> None:
        self._is_begun = True
        self._write(_UNFINISHED)

    def fail(self, reason: str) -> None:
        """Note why the start failed, if it had begun."""
        if self._is_begun:
            self._write(reason)

    def succeed(self) -> None:
        with survives("forget the start"):
            if self._file is not None:
                self._file.unlink(missing_ok=True)

    def _write(self, reason: str) -> None:
        with survives("note the start"):
            if self._file is not None:
                self._file.write_text(reason, encoding="utf-8")
