"""Copies of adapters in the making: one at a time of each, however often the adapter is tried.

A thread that copies cannot be ended, and a second one would wait for the same files. So a copy that stalls goes on, and
the next attempt waits for it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from outrider_crds.model_sources import AdapterSpec

from outrider_runtime.hub_download import STALL_S
from outrider_runtime.server.adapter_files import AdapterFiles, UnusableAdapterError
from outrider_runtime.server.loading_thread import run_in_daemon_thread

POLL_INTERVAL_S = 1.0


@dataclass(slots=True)
class AdapterCopy:
    folder: Path
    work: asyncio.Task[None]
    size: asyncio.Task[int]
    """The last measurement. It has a thread of its own, since a volume that hangs blocks it."""


@dataclass(slots=True)
class AdapterCopies:
    files: AdapterFiles
    clock: Callable[[], float]
    _in_flight: dict[AdapterSpec, AdapterCopy] = field(default_factory=dict)

    async def wait_for(self, spec: AdapterSpec) -> Path:
        """Return the folder of a copy once it is whole; the caller deletes it.

        Raises UnusableAdapterError, also if no byte came for STALL_S.
        """
        copy = self._in_flight.get(spec)
        if copy is None:
            copy = self._in_flight[spec] = self._begin(spec)
        await self._wait(spec, copy)
        del self._in_flight[spec]
        copy.work.result()
        return copy.folder

    def keep_only(self, specs: Iterable[AdapterSpec]) -> None:
        """Forget the copies for other specs, and delete each once its thread has ended."""
        for spec in self._in_flight.keys() - set(specs):
            copy = self._in_flight.pop(spec)
            copy.work.add_done_callback(partial(_delete, copy.folder))

    def _begin(self, spec: AdapterSpec) -> AdapterCopy:
        folder = self.files.new_folder()
        work = asyncio.create_task(run_in_daemon_thread(lambda: self.files.fill(folder, spec.source)))
        return AdapterCopy(folder, work, self._measure(folder, spec))

    def _measure(self, folder: Path, spec: AdapterSpec) -> asyncio.Task[int]:
        return asyncio.create_task(run_in_daemon_thread(lambda: self.files.bytes_on_disk(folder, spec.source)))

    async def _wait(self, spec: AdapterSpec, copy: AdapterCopy) -> None:
        last_size, since, is_done = -1, self.clock(), False
        while not is_done:
            is_done = bool((await asyncio.wait({copy.work}, timeout=POLL_INTERVAL_S))[0])
            if self._in_flight.get(spec) is not copy:
                raise UnusableAdapterError("its source is listed no longer")
            if copy.size.done():
                size = copy.size.result()
                last_size, since = size, self.clock() if size != last_size else since
                copy.size = self._measure(copy.folder, spec)
            if not is_done and self.clock() - since > STALL_S:
                raise UnusableAdapterError(f"no byte of its files came for {STALL_S:.0f} s")


def _delete(folder: Path, work: asyncio.Task[None]) -> None:
    if not work.cancelled():
        work.exception()  # else asyncio reports that nothing read it
    shutil.rmtree(folder, ignore_errors=True)
