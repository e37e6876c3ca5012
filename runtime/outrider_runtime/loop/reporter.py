"""The daemon thread of the engine core process that writes the state and reloads changed config and profile files.

A ConfigMap volume changes by swapping a symlink, so a file is identified by the inode that its path resolves to.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import Protocol

from outrider_crds.counters import StepCounters
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.runtime_config import HotConfig, config_hash, read_hot_config
from outrider_crds.runtime_state import ProfileState, RuntimeState
from pydantic import ValidationError

from outrider_runtime.control.state import Tally
from outrider_runtime.error_text import first_line
from outrider_runtime.file_stamp import FileStamp, stamp
from outrider_runtime.loop.control_loop import ControlLoop, UnusableConfigError
from outrider_runtime.loop.mounted_profile import (
    PodIdentity,
    UnreadableProfileError,
    load_profile,
    product_of_pod,
)
from outrider_runtime.loop.pod_state import choice, drafters, speedup
from outrider_runtime.loop.why import Decisions
from outrider_runtime.snapshot import WRITE_EVERY_S, write_decisions, write_snapshot
from outrider_runtime.worker_notes import read_drafter_memory, read_verification

logger = logging.getLogger("vllm.outrider")  # vLLM configures handlers for its own name only


_TALLIED = StepCounters.model_fields.keys() & {counter.name for counter in dataclasses.fields(Tally)}
"""Counters that the controller keeps under the names of the state."""


class Files(Protocol):
    """Paths that the reporter reads and writes."""

    @property
    def hot_file(self) -> str: ...
    @property
    def profiles_dir(self) -> str: ...
    @property
    def podinfo_dir(self) -> str: ...
    @property
    def run_dir(self) -> str: ...


class Reporter(threading.Thread):
    def __init__(
        self, loop: ControlLoop, files: Files, hot: HotConfig, identity: PodIdentity, *, started_at: float
    ) -> None:
        """hot: the config in force until the mounted file is read."""
        super().__init__(name="outrider-reporter", daemon=True)
        self._loop = loop
        self._files = files
        self._identity = identity
        self._decisions = Decisions(loop)
        self._started_at = started_at
        self._memory = read_drafter_memory(files.run_dir)
        self._verification = read_verification(files.run_dir)
        self._hot_hash = config_hash(hot.model_copy(update={"canary": None}) if loop.config_problem(hot) else hot)
        self._config_error = ""
        self._last_failure = ""
        self._profile = ProfileState()
        self._product = ""
        self._stamps: dict[str, tuple[FileStamp | None, ...]] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.tick()
                self._last_failure = ""
            except Exception as error:  # no other thread reports the pod's state: this one must survive any error
                self._log_once(error)
            self._stopped.wait(WRITE_EVERY_S)

    def stop(self) -> None:
        self._stopped.set()

    def _log_once(self, error: Exception) -> None:
        """Log an error unless it is the last one again: this runs four times a second."""
        if str(error) != self._last_failure:
            logger.error("outrider: state could not be reported", exc_info=error)
        self._last_failure = str(error)

    def tick(self) -> None:
        """Reload changed files, then write the state."""
        self._reload_hot()
        self._reload_profile()
        write_snapshot(self._files.run_dir, self.state())
        write_decisions(self._files.run_dir, self._decisions.text(time.time()))

    def _changed(self, name: str, *paths: Path) -> bool:
        stamps = tuple(stamp(path) for path in paths)
        changed = self._stamps.get(name) != stamps
        self._stamps[name] = stamps
        return changed

    def _reload_hot(self) -> None:
        path = Path(self._files.hot_file)
        if not self._changed("hot", path):
            return
        try:
            hot, digest = read_hot_config(path.read_bytes())
        except FileNotFoundError:
            return  # not mounted (yet): the config at the start stays in force
        except (OSError, ValidationError) as error:
            self._refuse(error)
            return
        try:
            self._loop.configure(hot)
        except UnusableConfigError as error:
            self._refuse(error)
            return
        except Exception:
            del self._stamps["hot"]  # not in force: try again
            raise
        self._hot_hash, self._config_error = digest, ""

    def _refuse(self, error: Exception) -> None:
        self._config_error = f"hot config cannot be used, the one before it stays in force: {first_line(error)}"
        logger.warning("outrider: %s", self._config_error)

    def _reload_profile(self) -> None:
        paths = self._files
        product = product_of_pod(Path(paths.podinfo_dir), self._loop.boot.accelerator.products)
        keys = next((keys for keys in self._loop.boot.profile_keys if keys.product == product), None)
        directory = Path(paths.profiles_dir, product)
        files = _profile_files(directory, keys)
        if not self._changed("profile", *files) and product == self._product:
            return
        self._product = product
        try:
            loaded = load_profile(directory, keys, self._identity)
        except UnreadableProfileError as error:
            self._profile = self._profile.model_copy(update={"load_error": str(error)})
            logger.warning("outrider: %s", error)
            return
        self._profile = loaded.state
        self._loop.replace_latency(loaded.latency)

    def state(self) -> RuntimeState:
        with self._loop.lock:  # the tally is live, not a copy
            return self._state()

    def _state(self) -> RuntimeState:
        boot, seen = self._loop.boot, self._loop.state()
        tally = seen.tally
        return RuntimeState(
            service=boot.service,
            namespace=boot.namespace,
            revision=boot.revision,
            config_hash=self._hot_hash,
            config_error=self._config_error,
            started_at=self._started_at,
            reported_at=time.time(),
            ready=False,  # the API server sets it
            plugin_active=True,
            product=self._product,
            device=self._identity.device,
            engine_version=self._identity.engine_version,
            verification=self._verification,
            profile=self._profile,
            choice=choice(self._loop, seen),
            **{name: getattr(tally, name) for name in _TALLIED},
            draft_length_steps=tally.lengths.tolist(),
            loop_failures=self._loop.failures,
            broken_answers=self._loop.broken_answers,
            decision_s=seen.decision_s,
            caught_up_tokens=self._loop.caught_up_tokens,
            catch_up_s=self._loop.catch_up_s,
            drafters=drafters(self._loop, seen, self._memory),
            slo_classes=self._loop.slo.states(),
            adapters=self._loop.adapters.states(self._loop.class_names),
            speedup=speedup(seen),
            canary=self._loop.arms.state(),
        )


def _profile_files(directory: Path, keys: ProfileKeys | None) -> list[Path]:
    if keys is None:
        return []
    return [directory / "target.json", *(directory / f"{key}.json" for key in keys.drafters.values())]
