"""Watches the manifest of `serve -f`: an edit of a hot field takes effect without a restart, as in a pod."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from outrider_crds.runtime_config import BootConfig, HotConfig, is_reordered

from outrider_runtime.file_stamp import stamp
from outrider_runtime.local_manifest import LocalManifestError, LocalService
from outrider_runtime.server.config import Serving, write_hot

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 1.0


def follow_manifest(manifest: Path, load: Callable[[], LocalService], serving: Serving) -> None:
    """Start a daemon thread that applies changes of `manifest` until the process ends. load: reads the manifest."""

    def follow() -> None:
        seen = stamp(manifest)
        while True:
            time.sleep(POLL_INTERVAL_S)
            latest = stamp(manifest)
            if latest != seen:
                seen = latest
                try:
                    apply_manifest(manifest, load, serving)
                except Exception:  # the thread must survive, so that the next change is read
                    logger.exception("the changed manifest is not used")

    threading.Thread(target=follow, name="outrider-manifest", daemon=True).start()


def apply_manifest(manifest: Path, load: Callable[[], LocalService], serving: Serving) -> None:
    """Write the manifest's hot config to the file that the engine watches. Warn if other changes need a restart."""
    try:
        service = load()
    except LocalManifestError as error:
        logger.error("the changed manifest is not used: %s", error)
        return
    if _boot_changed(service, serving):
        logger.warning("%s has changes that take effect only after a restart", manifest)
    write_hot(Path(serving.paths.hot_file), _hot(service, serving))
    logger.info("applied the hot config of %s", manifest)


def _boot_changed(service: LocalService, serving: Serving) -> bool:
    """Whether the boot config changed. A lower maximum draft length or another order of the pool is a hot change."""
    boot = service.boot.model_copy(update={"max_draft_tokens": serving.boot.max_draft_tokens})
    return _sort_pool(boot) != _sort_pool(serving.boot) or service.hot.max_draft_tokens > serving.boot.max_draft_tokens


def _hot(service: LocalService, serving: Serving) -> HotConfig:
    """Return the manifest's hot config, with the order of its drafters if that differs from the order at the start."""
    order = [drafter.name for drafter in service.boot.draft_pool]
    boot_order = [drafter.name for drafter in serving.boot.draft_pool]
    return service.hot.model_copy(update={"drafter_order": order if is_reordered(order, boot_order) else None})


def _sort_pool(boot: BootConfig) -> BootConfig:
    return boot.model_copy(update={"draft_pool": sorted(boot.draft_pool, key=lambda drafter: drafter.name)})
