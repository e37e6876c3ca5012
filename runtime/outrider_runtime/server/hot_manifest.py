"""`serve -f` follows its manifest as a pod follows its mounted config: an edit of a hot field restarts nothing."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from outrider_crds.runtime_config import BootConfig, HotConfig, is_reordered

from outrider_runtime.local_manifest import LocalManifestError, LocalService, load_local_service
from outrider_runtime.server.config import Serving, write_hot

logger = logging.getLogger(__name__)
POLL_S = 1.0


def follow_manifest(manifest: Path, model_root: Path, serving: Serving) -> None:
    """Take over changes of `manifest` for as long as the process lives, from a daemon thread."""

    def follow() -> None:
        seen = _stamp(manifest)
        while True:
            time.sleep(POLL_S)
            stamp = _stamp(manifest)
            if stamp != seen:
                seen = stamp
                try:
                    take_over(manifest, model_root, serving)
                except Exception:  # the next change is read all the same
                    logger.exception("the changed manifest is not used")

    threading.Thread(target=follow, name="outrider-manifest", daemon=True).start()


def take_over(manifest: Path, model_root: Path, serving: Serving) -> None:
    """Write the manifest's hot config where the engine reads it; say what only a restart can change."""
    try:
        service = load_local_service(manifest, model_root)
    except LocalManifestError as error:
        logger.error("the changed manifest is not used: %s", error)
        return
    if _boot_changed(service, serving):
        logger.warning("%s has changes that take effect after a restart", manifest)
    write_hot(Path(serving.paths.hot_file), _hot(service, serving))
    logger.info("took over the hot config of %s", manifest)


def _boot_changed(service: LocalService, serving: Serving) -> bool:
    """A lower draft length and another order of the pool are hot, and no change of the boot config."""
    boot = service.boot.model_copy(update={"max_draft_tokens": serving.boot.max_draft_tokens})
    return _by_name(boot) != _by_name(serving.boot) or service.hot.max_draft_tokens > serving.boot.max_draft_tokens


def _hot(service: LocalService, serving: Serving) -> HotConfig:
    """The manifest's hot config. The order of its drafters stands in it only where that is not the order at boot."""
    order, at_boot = ([drafter.name for drafter in pool] for pool in (service.boot.draft_pool, serving.boot.draft_pool))
    return service.hot.model_copy(update={"drafter_order": order if is_reordered(order, at_boot) else None})


def _by_name(boot: BootConfig) -> BootConfig:
    return boot.model_copy(update={"draft_pool": sorted(boot.draft_pool, key=lambda drafter: drafter.name)})


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:  # an editor is replacing it
        return None
    return status.st_mtime_ns, status.st_ino
