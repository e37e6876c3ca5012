"""The file that OUTRIDER_CONFIG names: it is followed while vLLM serves, and the state tells what of it is in force."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider_crds.base import digest
from outrider_crds.runtime_state import RuntimeState

from outrider_runtime.local_manifest import LocalManifestError, LocalService
from outrider_runtime.server.config import Serving
from outrider_runtime.server.hot_manifest import ManifestOutcome, follow_manifest
from outrider_runtime.stock_server.activity import StepAsideError
from outrider_runtime.stock_server.service_of_flags import read_fields


class ConfigFile:
    def __init__(self, path: Path, load: Callable[[], LocalService], serving: Serving) -> None:
        """load: reads the service that flags and file describe."""
        self._path = path
        self._load = load
        self._serving = serving
        self._read_digest = ""
        self._applied = ("", "")
        """Digest of the hot config that was written last, and that of the file that it came from."""
        self._in_force = ""
        self._outcome = ManifestOutcome()

    def follow(self) -> None:
        """Apply the file now, and its changes until the process ends."""
        follow_manifest(self._path, self._read, self._serving, self._note)

    def amend(self, state: RuntimeState) -> RuntimeState:
        """Return the engine's state with what it cannot know of the file."""
        hot_hash, file_digest = self._applied
        if state.config_hash == hot_hash:
            self._in_force = file_digest
        outcome = self._outcome
        return state.model_copy(
            update={
                "file_digest": self._in_force,
                "config_error": state.config_error or outcome.error,
                "restart_reason": outcome.restart_reason,
            }
        )

    def _read(self) -> LocalService:
        try:
            self._read_digest = digest(read_fields(self._path))
            return self._load()
        except StepAsideError as error:
            raise LocalManifestError(str(error)) from error

    def _note(self, outcome: ManifestOutcome) -> None:
        self._outcome = outcome
        if not outcome.error:
            self._applied = outcome.hot_hash, self._read_digest
