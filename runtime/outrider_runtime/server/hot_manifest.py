"""Watches the manifest of `serve -f`: an edit of a hot field takes effect without a restart, as in a pod."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider_crds.runtime_config import BootConfig, HotConfig, config_hash, is_reordered

from outrider_runtime.error_text import with_type
from outrider_runtime.file_stamp import stamp
from outrider_runtime.local_manifest import LocalManifestError, LocalService
from outrider_runtime.server.config import Serving, write_hot

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ManifestOutcome:
    """What became of the manifest's latest contents."""

    hot_hash: str = ""
    """Digest of the hot config that was written; empty if the contents are not used."""
    error: str = ""
    """Why they are not used."""
    restart_reason: str = ""
    """What of them takes effect only after a restart."""


def follow_manifest(
    manifest: Path,
    load: Callable[[], LocalService],
    serving: Serving,
    note: Callable[[ManifestOutcome], None] = lambda _: None,
) -> None:
    """Start a daemon thread that applies changes of `manifest` until the process ends. load: reads the manifest.

    What it has when the thread starts is applied, too: it may have changed while the engine started.
    """

    def follow() -> None:
        seen = None
        while True:
            latest = stamp(manifest)
            if latest is not None and latest != seen:
                seen = latest
                try:
                    note(apply_manifest(manifest, load, serving))
                except Exception as error:  # the thread must survive, so that the next change is read
                    logger.exception("the changed manifest is not used")
                    note(ManifestOutcome(error=with_type(error)))
            time.sleep(POLL_INTERVAL_S)

    threading.Thread(target=follow, name="outrider-manifest", daemon=True).start()


def apply_manifest(manifest: Path, load: Callable[[], LocalService], serving: Serving) -> ManifestOutcome:
    """Write the manifest's hot config to the file that the engine watches. Warn if other changes need a restart."""
    try:
        service = load()
    except LocalManifestError as error:
        logger.error("the changed manifest is not used: %s", error)
        return ManifestOutcome(error=str(error))
    reason, hot = _restart_reason(service, serving), _hot(service, serving)
    if reason:
        logger.warning("%s has changes that take effect only after a restart: %s", manifest, reason)
    write_hot(Path(serving.paths.hot_file), hot)
    logger.info("applied the hot config of %s", manifest)
    return ManifestOutcome(hot_hash=config_hash(hot), restart_reason=reason)


def _restart_reason(service: LocalService, serving: Serving) -> str:
    """What only a restart changes. A lower maximum draft length or another order of the pool is a hot change."""
    most = serving.boot.max_draft_tokens
    if service.hot.max_draft_tokens > most:
        return f"speculation.maxDraftTokens is above {most}, which the engine was started for"
    boot, at_start = (
        _sort_pool(config.model_copy(update={"max_draft_tokens": most})) for config in (service.boot, serving.boot)
    )
    if boot.draft_pool != at_start.draft_pool:
        return "the drafters of draftPool are not those of the start"
    return "" if boot == at_start else "target, accelerator or engine are not those of the start"


def _hot(service: LocalService, serving: Serving) -> HotConfig:
    """Return the manifest's hot config, with the order of its drafters if that differs from the order at the start."""
    order = [drafter.name for drafter in service.boot.draft_pool]
    boot_order = [drafter.name for drafter in serving.boot.draft_pool]
    return service.hot.model_copy(update={"drafter_order": order if is_reordered(order, boot_order) else None})


def _sort_pool(boot: BootConfig) -> BootConfig:
    return boot.model_copy(update={"draft_pool": sorted(boot.draft_pool, key=lambda drafter: drafter.name)})
