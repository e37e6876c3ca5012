"""The daemon thread of the engine core process: writes the state, and picks up changed config and profile files.

ConfigMap volumes change by swapping a symlink, so a file's identity is that of what its path resolves to.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from outrider_crds.profile import ProfileKeys
from outrider_crds.runtime_config import config_hash, read_hot_config
from outrider_crds.state import (
    ChoiceState,
    DrafterState,
    ProfileState,
    RuntimeState,
    SpeedupState,
)
from pydantic import ValidationError

from outrider_runtime.control.counters import ControllerSnapshot, DrafterCounters
from outrider_runtime.snapshot import WRITE_EVERY_S, write_snapshot
from outrider_runtime.vllm_plugin.loop import ControlLoop
from outrider_runtime.vllm_plugin.profiles import (
    Identity,
    UnreadableProfileError,
    first_line,
    load_profile,
    product_of_pod,
)

logger = logging.getLogger("vllm.outrider")  # vLLM configures handlers for its own name only
Stamp = tuple[int, int, int]


class Reporter(threading.Thread):
    def __init__(self, loop: ControlLoop, identity: Identity, *, started_at: float) -> None:
        super().__init__(name="outrider-reporter", daemon=True)
        self._loop = loop
        self._plan = loop.plan
        self._identity = identity
        self._started_at = started_at
        self._hot_hash = config_hash(loop.plan.hot)
        self._config_error = ""
        self._last_failure = ""
        self._profile = ProfileState()
        self._product = ""
        self._stamps: dict[str, tuple[Stamp | None, ...]] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.tick()
                self._last_failure = ""
            except Exception as error:  # the thread is the pod's only voice: it must outlive any one failure
                self._log_once(error)
            self._stopped.wait(WRITE_EVERY_S)

    def stop(self) -> None:
        self._stopped.set()

    def _log_once(self, error: Exception) -> None:
        """Four times a second would drown the log."""
        if str(error) != self._last_failure:
            logger.error("outrider: state could not be reported", exc_info=error)
        self._last_failure = str(error)

    def tick(self) -> None:
        """One round: pick up what changed, then write the state."""
        self._reload_hot()
        self._reload_profile()
        write_snapshot(self._plan.paths.run_dir, self.state())

    def _changed(self, name: str, *paths: Path) -> bool:
        stamps = tuple(_stamp(path) for path in paths)
        changed = self._stamps.get(name) != stamps
        self._stamps[name] = stamps
        return changed

    def _reload_hot(self) -> None:
        path = Path(self._plan.paths.hot_file)
        if not self._changed("hot", path):
            return
        try:
            hot, self._hot_hash = read_hot_config(path.read_bytes())
        except FileNotFoundError:
            return  # not mounted (yet): what the engine was started with stays in force
        except (OSError, ValidationError) as error:
            self._config_error = f"hot config cannot be used, the one before it stays in force: {first_line(error)}"
            logger.warning("outrider: %s", self._config_error)
            return
        self._config_error = ""
        self._loop.configure(hot)

    def _reload_profile(self) -> None:
        paths = self._plan.paths
        product = product_of_pod(Path(paths.podinfo_dir), self._plan.boot.accelerator.products)
        keys = next((keys for keys in self._plan.boot.profile_keys if keys.product == product), None)
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
        seen = self._loop.snapshot()
        boot = self._plan.boot
        return RuntimeState(
            service=boot.service,
            namespace=boot.namespace,
            revision=boot.revision,
            config_hash=self._hot_hash,
            config_error=self._config_error,
            started_at=self._started_at,
            now=time.time(),
            ready=False,  # the API server's to say
            plugin_active=True,
            product=self._product,
            device=self._identity.device,
            engine_version=self._identity.engine_version,
            profile=self._profile,
            choice=_choice(seen),
            steps=seen.steps,
            speculative_steps=seen.speculative_steps,
            output_tokens=seen.output_tokens,
            busy_s=seen.busy_s,
            proposed_tokens=seen.proposed_tokens,
            draft_length_steps=list(seen.draft_length_steps),
            dropped_steps=seen.dropped_steps,
            decision_s=seen.decision_s,
            caught_up_tokens=seen.caught_up_tokens,
            catch_up_s=seen.catch_up_s,
            drafters=[self._drafter(drafter.name, seen) for drafter in boot.draft_pool],
            slo_classes=self._loop.slo.states(),
            speedup=_speedup(seen),
        )

    def _drafter(self, name: str, seen: ControllerSnapshot) -> DrafterState:
        dropped = self._loop.dropped.get(name)
        if dropped is not None:
            return DrafterState(name=name, loaded=False, reason=dropped)
        counters = seen.drafters.get(name, DrafterCounters())
        return DrafterState(
            name=name,
            loaded=True,
            reason=counters.suspended,
            request_steps=counters.request_steps,
            tried=counters.tried,
            verified=counters.verified,
            accepted=counters.accepted,
        )


def _choice(seen: ControllerSnapshot) -> ChoiceState:
    return ChoiceState(
        drafter=seen.drafter,
        draft_tokens=seen.draft_tokens,
        reason=seen.reason.value,
        gated=seen.gated,
        running=seen.running,
    )


def _speedup(seen: ControllerSnapshot) -> SpeedupState:
    counted = seen.speedup
    return SpeedupState(
        probes=counted.probes,
        baseline_tokens=round(counted.baseline_tokens),  # neighbours weigh by the probe's length: no whole numbers
        baseline_s=counted.baseline_s,
        speculative_tokens=round(counted.speculative_tokens),
        speculative_s=counted.speculative_s,
    )


def _profile_files(directory: Path, keys: ProfileKeys | None) -> list[Path]:
    if keys is None:
        return []
    return [directory / "target.json", *(directory / f"{key}.json" for key in keys.drafters.values())]


def _stamp(path: Path) -> Stamp | None:
    """Identity of what `path` resolves to; None when it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
