"""`outrider-prefetch`: downloads a service's hub models into the claim that its pods share, and reports progress."""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import NoReturn

from outrider_crds.prefetch_report import PREFETCH_PATH, PrefetchProgress
from outrider_crds.runtime_config import ADMIN_PORT

from outrider_runtime.server.listeners import listen
from outrider_runtime.server.page_server import PageServer, WebPage

logger = logging.getLogger(__name__)
_DESCRIPTION = "Download a service's hub models into the claim that its pods share, and report progress."
TERMINATED = 143  # 128 + SIGTERM, as a shell reports it
SAFE_WEIGHTS = "*.safetensors"
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.tflite", "*.ot")
"""Weights that engines leave alone where a model has safetensors."""
NEVER_LOADED = ("original/*", "*.h5", "*.msgpack", "*.onnx", "*.tflite", "*.ot")
"""Copies for other libraries."""


@dataclass(frozen=True)
class HubModel:
    name: str
    revision: str | None
    is_target: bool
    """A target that is not there is fatal. A draft is left out by the pods, which say so."""


@dataclass(frozen=True)
class Download:
    model: HubModel
    files: tuple[str, ...]
    size_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit with 0 once the target is on the claim, 1 if it cannot be had."""
    signal.signal(signal.SIGTERM, _terminated)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)  # not that of the HTTP client, which tells of each request
    options = parser().parse_args(arguments)
    board = ProgressBoard()
    PageServer(listen("", options.admin_port, "--admin-port"), board.answer).start()
    models = [*(_model(text, is_target=True) for text in options.target), *map(_model, options.draft)]
    try:
        downloads = [download for model in models if (download := _planned(model)) is not None]
        board.plan(downloads)
        on_claim = [download.model for download in downloads if _is_fetched(download, board)]
        board.end(summary(models, on_claim))
    except DownloadError as error:
        sys.exit(f"outrider-prefetch: {error}")


class DownloadError(Exception):
    """A model cannot be had from the hub; the message says which and why."""


class ProgressBoard:
    """What the admin page says."""

    def __init__(self) -> None:
        self._total_bytes = 0
        self._folders: tuple[Path, ...] = ()
        self._current = ""

    def plan(self, downloads: Iterable[Download]) -> None:
        downloads = tuple(downloads)
        self._total_bytes = sum(download.size_bytes for download in downloads)
        self._folders = tuple({_blobs(download.model.name) for download in downloads})

    def begin(self, download: Download) -> None:
        self._current = download.model.name
        logger.info("downloading %s: %d files, %d bytes", self._current, len(download.files), download.size_bytes)

    def end(self, summary: str) -> None:
        self._current = ""
        logger.info("%s", summary)

    def progress(self) -> PrefetchProgress:
        """What of the models is on the claim, files that are being written included."""
        on_claim = sum(_size(file) for folder in self._folders for file in folder.glob("*"))
        return PrefetchProgress(
            model=self._current[:256],
            downloaded_bytes=min(on_claim, self._total_bytes),
            total_bytes=self._total_bytes,
        )

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


def wanted_files(files: Iterable[str]) -> tuple[str, ...]:
    """Files that an engine may load: safetensors where there are any, and what is no weights."""
    files = tuple(files)
    has_safe = any(fnmatch.fnmatch(file, SAFE_WEIGHTS) for file in files)
    ignored = (*NEVER_LOADED, *(OTHER_WEIGHTS if has_safe else ()))
    return tuple(file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in ignored))


def _planned(model: HubModel) -> Download | None:
    """None for a draft that is not there."""
    from huggingface_hub import HfApi  # part of the engine's own installation

    try:
        info = HfApi().model_info(model.name, revision=model.revision, files_metadata=True)
    except Exception as error:  # the hub client's errors share no base class
        _without(model, error)
        return None
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = wanted_files(sizes)
    return Download(model, files, sum(sizes[file] for file in files))


def _is_fetched(download: Download, board: ProgressBoard) -> bool:
    """Download, and return False for a draft that cannot be had."""
    from huggingface_hub import snapshot_download

    model = download.model
    board.begin(download)
    try:
        snapshot_download(model.name, revision=model.revision, allow_patterns=list(download.files))
    except Exception as error:  # as above
        _without(model, error)
        return False
    return True


def _without(model: HubModel, error: Exception) -> None:
    """Raises DownloadError for a target."""
    why = " ".join(str(error).split())
    if model.is_target:
        raise DownloadError(f"model {model.name!r} cannot be had from the hub: {why}") from error
    logger.warning("draft %r is left out: %s", model.name, why)


def _blobs(name: str) -> Path:
    """Folder in which the hub's client keeps a model's files."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # it was renamed meanwhile
        return 0


def _json(status: HTTPStatus, document: object) -> WebPage:
    return WebPage(status, "application/json", json.dumps(document).encode())


def _model(text: str, *, is_target: bool = False) -> HubModel:
    name, _, revision = text.rpartition("@")
    return HubModel(name, revision or None, is_target)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="outrider-prefetch", description=_DESCRIPTION)
    made.add_argument("--target", action="append", default=[], metavar="NAME@REVISION", help="must be on the hub")
    made.add_argument("--draft", action="append", default=[], metavar="NAME@REVISION", help="may be absent there")
    made.add_argument("--admin-port", type=int, default=ADMIN_PORT, help="port of the page with the progress")
    return made


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)
