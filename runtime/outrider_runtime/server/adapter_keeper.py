"""Keeps the engine's LoRA adapters as the hot config lists them, while it serves.

An adapter is loaded under a number of its own, and offered to requests once the engine has accepted it. Another source
of the same name is loaded together with the earlier one, which serves on until then, and afterwards for the requests
that already run with it. An adapter that cannot be loaded is tried again, less and less often. One that the hub or
bucket refuses is tried once an hour, as model downloads are.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from outrider_crds.model_sources import RETRY_REFUSED_AFTER_S, AdapterSource, AdapterSpec
from outrider_crds.runtime_config import HotConfig
from outrider_crds.runtime_state import AdapterState
from pydantic import ValidationError

from outrider_runtime.error_text import MAX_CHARACTERS
from outrider_runtime.server.adapter_copies import AdapterCopies
from outrider_runtime.server.adapter_files import AdapterFiles, UnusableAdapterError

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 1.0
FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
LINGER_S = 60.0
"""Time for which files of an adapter stay after its last request: one may be on its way to the engine."""


class AdapterEngine(Protocol):
    """An engine that hosts adapters."""

    async def add(self, name: str, folder: Path) -> int:
        """Load an adapter and return its number. Raises UnusableAdapterError if the engine refuses it."""

    def offer(self, number: int) -> None:
        """Serve requests that come from now on and ask for its name with this adapter."""

    def withdraw(self, name: str) -> None:
        """Serve no further requests of this name."""

    def is_used(self, number: int) -> bool:
        """Whether a request runs with this adapter."""

    async def remove(self, number: int) -> None:
        """Free the adapter's memory."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    source: AdapterSource
    number: int
    folder: Path


@dataclass(frozen=True, slots=True)
class FailedLoad:
    source: AdapterSource
    reason: str
    retry_at: float
    wait_s: float


@dataclass(slots=True)
class AdapterKeeper:
    engine: AdapterEngine
    files: AdapterFiles
    hot_file: Path
    at_boot: HotConfig
    clock: Callable[[], float] = time.monotonic
    _specs: dict[str, AdapterSpec] = field(default_factory=dict)
    _loaded: dict[str, LoadedAdapter] = field(default_factory=dict)
    _failed: dict[str, FailedLoad] = field(default_factory=dict)
    _loads: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _ends: set[asyncio.Task[None]] = field(default_factory=set)
    _copies: AdapterCopies = field(init=False)

    def __post_init__(self) -> None:
        self._copies = AdapterCopies(self.files, self.clock)

    async def run(self) -> None:
        """Follow the hot config until cancelled."""
        while True:
            try:
                self.tick()
            except Exception:  # the task must survive, so that the next change is read
                logger.exception("adapters could not be brought up to date")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def first_loads(self, timeout_s: float) -> None:
        """Try to load each adapter once. Loads that take longer than `timeout_s` go on by themselves."""
        self.tick()
        if self._loads:
            await asyncio.wait(self._loads.values(), timeout=timeout_s)

    def stop(self) -> None:
        for task in (*self._loads.values(), *self._ends):
            task.cancel()

    def states(self) -> tuple[AdapterState, ...]:
        return tuple(self._state(spec) for spec in self._specs.values())

    def tick(self) -> None:
        """Read the hot config, and begin what it asks for."""
        self._specs = _read_specs(self.hot_file, self.at_boot, self._specs)
        self._copies.keep_only(self._specs.values())
        for name in self._loaded.keys() - self._specs.keys():
            self.engine.withdraw(name)
            self._retire(self._loaded.pop(name))
        for name in self._failed.keys() - self._specs.keys():
            del self._failed[name]
        for name, spec in self._specs.items():
            if name not in self._loads and self._is_due(spec):
                self._loads[name] = asyncio.create_task(self._load(spec))

    def _is_due(self, spec: AdapterSpec) -> bool:
        loaded, failed = self._loaded.get(spec.name), self._failed.get(spec.name)
        if loaded is not None and loaded.source == spec.source:
            self._failed.pop(spec.name, None)
            return False
        return failed is None or failed.source != spec.source or self.clock() >= failed.retry_at

    async def _load(self, spec: AdapterSpec) -> None:
        try:
            folder = await self._copies.wait_for(spec)
            try:
                number = await self.engine.add(spec.name, folder)
            except Exception:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        except Exception as error:  # of the engine; of a file that is not what its name says
            self._note_failure(spec, error)
        else:
            self._put_in_place(spec, LoadedAdapter(spec.source, number, folder))
        finally:
            self._loads.pop(spec.name, None)

    def _put_in_place(self, spec: AdapterSpec, adapter: LoadedAdapter) -> None:
        self._failed.pop(spec.name, None)
        if spec.name not in self._specs:
            self._retire(adapter)
            return
        earlier = self._loaded.get(spec.name)
        self._loaded[spec.name] = adapter
        self.engine.offer(adapter.number)
        logger.info("adapter %r is loaded", spec.name)
        if earlier is not None:
            self._retire(earlier)

    def _note_failure(self, spec: AdapterSpec, error: Exception) -> None:
        reason = str(error) if isinstance(error, UnusableAdapterError) else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())[:MAX_CHARACTERS]
        last = self._failed.get(spec.name)
        again = last is not None and last.source == spec.source
        wait_s = _wait_s(error, last.wait_s if last is not None and again else 0.0)
        if last is None or last.reason != reason:
            logger.warning("adapter %r is not loaded: %s", spec.name, reason)
        self._failed[spec.name] = FailedLoad(spec.source, reason, self.clock() + wait_s, wait_s)

    def _retire(self, adapter: LoadedAdapter) -> None:
        task = asyncio.create_task(self._end(adapter))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _end(self, adapter: LoadedAdapter) -> None:
        """Free an adapter once no request runs with it."""
        unused = 0
        while unused < 2:  # a request may be between the API and the engine
            await asyncio.sleep(POLL_INTERVAL_S)
            unused = 0 if self.engine.is_used(adapter.number) else unused + 1
        with suppress(Exception):  # the engine has ended
            await self.engine.remove(adapter.number)
        await asyncio.sleep(LINGER_S)
        shutil.rmtree(adapter.folder, ignore_errors=True)

    def _state(self, spec: AdapterSpec) -> AdapterState:
        failed = self._failed.get(spec.name)
        is_current = failed is not None and failed.source == spec.source
        reason = failed.reason if failed is not None and is_current else ""
        return AdapterState(name=spec.name, loaded=spec.name in self._loaded, reason=reason)


def _wait_s(error: Exception, last_wait_s: float) -> float:
    """Return the seconds until the next attempt. last_wait_s: those before this one; 0 after none."""
    if isinstance(error, UnusableAdapterError) and error.is_refused:
        return RETRY_REFUSED_AFTER_S
    return min(2 * last_wait_s, LONGEST_RETRY_S) if 0.0 < last_wait_s <= LONGEST_RETRY_S else FIRST_RETRY_S


def _read_specs(hot_file: Path, at_boot: HotConfig, last: Mapping[str, AdapterSpec]) -> dict[str, AdapterSpec]:
    """Return the adapters of the mounted hot config; the last ones if it cannot be read, which the engine reports."""
    try:
        hot = HotConfig.read(hot_file.read_bytes())
    except FileNotFoundError:
        hot = at_boot
    except (OSError, ValidationError):
        return dict(last)
    return {spec.name: spec for spec in hot.adapters or ()}
