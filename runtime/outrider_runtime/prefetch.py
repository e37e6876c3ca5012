"""`outrider-prefetch`: downloads a service's hub models into the claim that its pods share, and reports progress."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from outrider_crds.prefetch_report import PREFETCH_PATH, PREFETCH_REFUSED, PrefetchProgress
from outrider_crds.runtime_config import ADMIN_PORT

from outrider_runtime.hub_download import (
    Download,
    DownloadError,
    HubModel,
    attempt,
    blobs_folder,
    bytes_in,
    fetch,
    plan,
)
from outrider_runtime.server.listeners import listen
from outrider_runtime.server.page_server import PageServer, WebPage

logger = logging.getLogger(__name__)
_DESCRIPTION = "Download a service's hub models into the claim that its pods share, and report progress."
TERMINATED = 143  # 128 + SIGTERM, as a shell reports it
TARGET_PAUSES, DRAFT_PAUSES = 40, 7
"""Pauses between attempts: six hours in all for a target, ten minutes for a draft, which a pod serves without."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 600.0  # each pause is twice the one before
T = TypeVar("T")
A = TypeVar("A")


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit with 0 once the target is on the claim, PREFETCH_REFUSED if no later attempt can get it, else with 1."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)  # not that of the HTTP client, which tells of each request
    options = parser().parse_args(arguments)
    board = ProgressBoard()
    PageServer(listen("", options.admin_port, "--admin-port"), board.answer).start()
    models = [*(_model(text, is_target=True) for text in options.target), *map(_model, options.draft)]
    try:
        downloads = [
            download for model in models if (download := _try_repeatedly(plan, model, model, board)) is not None
        ]
        board.plan(downloads)
        on_claim = [download.model for download in downloads if _is_fetched(download, board)]
        board.end(summary(models, on_claim))
    except DownloadError as error:
        logger.error("outrider-prefetch: %s", error)
        sys.exit(PREFETCH_REFUSED if error.is_final else 1)


class ProgressBoard:
    """What the admin page says."""

    def __init__(self) -> None:
        self._total_bytes = 0
        self._folders: tuple[Path, ...] = ()
        self._current = ""
        self.trouble = ""
        """What keeps the download back until the next attempt."""

    def plan(self, downloads: Iterable[Download]) -> None:
        downloads = tuple(downloads)
        self._total_bytes = sum(download.size_bytes for download in downloads)
        self._folders = tuple({blobs_folder(download.model.name) for download in downloads if download.files})

    def begin(self, download: Download) -> None:
        self._current = download.model.name
        logger.info("downloading %s: %d files, %d bytes", self._current, len(download.files), download.size_bytes)

    def end(self, summary: str) -> None:
        self._current = ""
        logger.info("%s", summary)

    def progress(self) -> PrefetchProgress:
        return PrefetchProgress(
            model=self._current[:256],
            downloaded_bytes=min(self.bytes_on_claim(), self._total_bytes),
            total_bytes=self._total_bytes,
            trouble=self.trouble[:512],
        )

    def bytes_on_claim(self) -> int:
        """Bytes of the models on the claim, files that are being written included."""
        return bytes_in(*self._folders)

    def answer(self, target: str) -> WebPage:
        if target.partition("?")[0] != PREFETCH_PATH:
            return _json(HTTPStatus.NOT_FOUND, {"error": f"no such page; this port serves {PREFETCH_PATH}"})
        return _json(HTTPStatus.OK, self.progress().wire())


def summary(models: Iterable[HubModel], on_claim: Iterable[HubModel]) -> str:
    """The last line of a download that succeeded: what of `models` is on the claim."""
    drafts = [model for model in models if not model.is_target]
    on_claim = tuple(on_claim)
    targets = ["the target"] if any(model.is_target for model in on_claim) else []
    present = sum(not model.is_target for model in on_claim)
    counted = [f"{present} of {len(drafts)} drafts"] if drafts else []
    return f"on the claim: {' and '.join([*targets, *counted]) or 'nothing'}"


def _is_fetched(download: Download, board: ProgressBoard) -> bool:
    """Download, and return False for a draft that cannot be had."""
    board.begin(download)
    return _try_repeatedly(fetch, download, download.model, board) is not None


def _try_repeatedly(work: Callable[[A], T], argument: A, model: HubModel, board: ProgressBoard) -> T | None:
    """Repeat `work` after growing pauses, and return its result; None for a draft that cannot be had.

    Raises DownloadError for a target."""
    count = TARGET_PAUSES if model.is_target else DRAFT_PAUSES
    pauses = (min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) for number in range(count))
    while True:
        try:
            result = attempt(work, argument, board.bytes_on_claim)
        except DownloadError as error:
            pause_s = None if error.is_final else next(pauses, None)
            if pause_s is None:
                _leave_out(model, error)
                return None
            board.trouble = f"{error}; it is tried again"
            logger.warning("model %r: %s; it is tried again in %.0f s", model.name, error, pause_s)
            time.sleep(pause_s)
        else:
            board.trouble = ""
            return result


def _leave_out(model: HubModel, error: DownloadError) -> None:
    """Raises DownloadError for a target."""
    if model.is_target:
        why = f"model {model.name!r} cannot be had from the hub: {error}"
        raise DownloadError(why, is_final=error.is_final) from error
    logger.warning("draft %r is left out: %s", model.name, error)


def _json(status: HTTPStatus, document: object) -> WebPage:
    return WebPage(status, "application/json", json.dumps(document).encode())


def _model(text: str, *, is_target: bool = False) -> HubModel:
    name, _, revision = text.rpartition("@")
    return HubModel(name, revision or None, is_target)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="outrider-prefetch", description=_DESCRIPTION)
    made.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="NAME@REVISION",
        help="model to download; the program fails if it cannot",
    )
    made.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="NAME@REVISION",
        help="draft to download; a failure is reported, and the rest goes on",
    )
    made.add_argument("--admin-port", type=int, default=ADMIN_PORT, help="port of the page with the progress")
    return made


def _exit_on_signal(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)
