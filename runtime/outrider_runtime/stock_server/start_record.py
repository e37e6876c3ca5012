"""Remembers a start that did not end well, in the user's folder OUTRIDER_RUN_DIR.

If Outrider fails late, vLLM loads the model a second time. A startup probe that allows for one load ends the container
before that, so every start would end so. The next start with the same flags therefore begins with vLLM alone. A start
that was stopped before it ended may have been stopped by anything: Outrider is tried once more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from outrider_runtime.identity import engine_version, outrider_version
from outrider_runtime.paths import RUN_DIR_VARIABLE
from outrider_runtime.stock_server.activity import StepAsideError, survives
from outrider_runtime.stock_server.service_of_flags import FILE_VARIABLE

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that tell apart equal engines on the GPUs of one host."""
_MAX_STOPPED = 2
"""Starts in a row that were stopped before they ended, from which vLLM starts alone."""


@dataclass(frozen=True)
class EarlierStarts:
    """stopped: how many in a row did not end. failure: why the last one failed, empty if it did not."""

    stopped: int = 0
    failure: str = ""


class StartRecord:
    """A file that notes a start with Outrider. A start that succeeds deletes it."""

    def __init__(self, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
        """flags: the fields of vLLM's EngineArgs. Nothing is remembered without a folder of the user's."""
        folder = environ.get(RUN_DIR_VARIABLE)
        self._file = Path(folder, f"start-{socket.gethostname()}-{_digest(flags, environ)}.json") if folder else None
        self._is_begun = False

    def check(self) -> None:
        """Raise StepAsideError if an earlier start with these flags failed, or if two in a row were stopped."""
        earlier = self._read()
        if earlier.failure:
            self._refuse(f"the last start with these flags failed ({earlier.failure})")
        if earlier.stopped >= _MAX_STOPPED:
            self._refuse(f"the last {earlier.stopped} starts with these flags were stopped before they had ended")

    def begin(self) -> None:
        """Note the start as stopped, for the case that nothing is noted any more."""
        self._is_begun = True
        self._write(EarlierStarts(self._read().stopped + 1))

    def fail(self, reason: str) -> None:
        """Note why the start failed, if it had begun."""
        if self._is_begun:
            self._write(EarlierStarts(failure=reason))

    def succeed(self) -> None:
        with survives("forget the start"):
            if self._file is not None:
                self._file.unlink(missing_ok=True)

    def _refuse(self, reason: str) -> None:
        raise StepAsideError(f"{reason}; delete {self._file} to try again")

    def _read(self) -> EarlierStarts:
        with survives("read the note of an earlier start"):
            if self._file is not None and self._file.is_file():
                return TypeAdapter(EarlierStarts).validate_json(self._file.read_bytes())
        return EarlierStarts()

    def _write(self, starts: EarlierStarts) -> None:
        with survives("note the start"):
            if self._file is not None:
                self._file.write_text(json.dumps(asdict(starts)), encoding="utf-8")


def _digest(flags: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return what tells apart starts that may end differently: versions, GPUs, flags, and the file's contents."""
    texts = {name: _ADDRESS.sub("", repr(value)) for name, value in flags.items()}
    contents = ""
    if file := environ.get(FILE_VARIABLE):
        with survives(f"read {FILE_VARIABLE}"):
            contents = Path(file).read_text(encoding="utf-8")
    devices = [environ.get(name) for name in _DEVICES]
    known = json.dumps([engine_version(), outrider_version(), devices, texts, contents], sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:12]
