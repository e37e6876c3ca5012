"""Downloads from the hub: what of a model is needed, what went wrong, and one attempt in a process of its own.

The hub's client blocks while it downloads, and some of its threads cannot be stopped. In a process of its own a
download that hangs can be ended.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

SAFE_WEIGHTS = "*.safetensors"
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.tflite", "*.ot")
"""Weights that engines leave alone where a model has safetensors."""
NEVER_LOADED = ("original/*", "*.h5", "*.msgpack", "*.onnx", "*.tflite", "*.ot")
"""Copies for other libraries."""
STALL_S = 300.0
"""Time without a new byte after which an attempt has failed: longer than the client's own retries take."""
_PASSING_CODES = frozenset({408, 425, 429})
"""HTTP codes below 500 that a later attempt may not get."""
_FINAL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors of the claim: it is full, or may not be written."""
_POLL_S = 1.0
T = TypeVar("T")
A = TypeVar("A")


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
    """Files to download; none if the hub is away, and the claim has all of them."""
    size_bytes: int


class DownloadError(Exception):
    """An attempt failed. `is_final`: no later attempt can succeed."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


def wanted_files(files: Iterable[str]) -> tuple[str, ...]:
    """Files that an engine may load: safetensors where there are any, and what is no weights."""
    files = tuple(files)
    has_safe = any(fnmatch.fnmatch(file, SAFE_WEIGHTS) for file in files)
    ignored = (*NEVER_LOADED, *(OTHER_WEIGHTS if has_safe else ()))
    return tuple(file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in ignored))


def plan(model: HubModel) -> Download:
    """Ask the hub for the model's files. If it does not answer, what is whole on the claim needs no download."""
    from huggingface_hub import HfApi  # part of the engine's own installation

    try:
        info = HfApi().model_info(model.name, revision=model.revision, files_metadata=True)
    except Exception:  # the hub client's errors share no base class
        if is_on_claim(model):
            return Download(model, (), 0)
        raise
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = wanted_files(sizes)
    return Download(model, files, sum(sizes[file] for file in files))


def fetch(download: Download) -> bool:
    """Download, or do nothing where the claim has all files."""
    from huggingface_hub import snapshot_download

    model = download.model
    if download.files:
        snapshot_download(model.name, revision=model.revision, allow_patterns=list(download.files))
    return True


def is_on_claim(model: HubModel) -> bool:
    """Has the claim every file that an engine may load, by the client's own list of the model's files?"""
    from huggingface_hub import snapshot_download

    for weights, ignored in ((SAFE_WEIGHTS, OTHER_WEIGHTS), ("*.bin", ())):
        with suppress(Exception):  # as above
            folder = Path(
                snapshot_download(
                    model.name,
                    revision=model.revision,
                    ignore_patterns=[*NEVER_LOADED, *ignored],
                    local_files_only=True,
                )
            )
            if _is_whole(folder, weights):
                return True
    return False


def _is_whole(folder: Path, weights: str) -> bool:
    """Are there weights, and all that an index names? Earlier clients left no list of the model's files."""
    indexes = [json.loads(index.read_bytes()) for index in folder.glob("*.index.json")]
    shards = {file for index in indexes for file in index["weight_map"].values() if fnmatch.fnmatch(file, weights)}
    return any(folder.rglob(weights)) and all((folder / shard).is_file() for shard in shards)


def blobs_folder(name: str) -> Path:
    """Folder in which the hub's client keeps a model's files."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")


def bytes_in(*folders: Path) -> int:
    """Bytes of the files in `folders`, those that are being written included."""
    return sum(_size(file) for folder in folders for file in folder.glob("*"))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # it was renamed meanwhile
        return 0


def attempt(work: Callable[[A], T], argument: A, bytes_on_claim: Callable[[], int], stall_s: float = STALL_S) -> T:
    """Run `work` in a process of its own and return its result. Raises DownloadError, also once no byte has come for
    `stall_s`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, argument, sender), daemon=True)
    process.start()
    sender.close()
    try:
        _wait(receiver, bytes_on_claim, stall_s)
        result: T | DownloadError = receiver.recv()
    except EOFError:
        process.join()
        raise DownloadError(f"the download ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(result, DownloadError):
        raise result
    return result


def _run(work: Callable[[A], T], argument: A, sender: Connection) -> None:
    try:
        sender.send(work(argument))
    except Exception as error:  # as above
        sender.send(DownloadError(" ".join(str(error).split()) or type(error).__name__, is_final=is_final(error)))


def _wait(receiver: Connection, bytes_on_claim: Callable[[], int], stall_s: float) -> None:
    """Wait for the result of a process. Raises DownloadError if it makes no progress."""
    last_size, since = bytes_on_claim(), time.monotonic()
    while not receiver.poll(_POLL_S):
        size = bytes_on_claim()
        if size != last_size:
            last_size, since = size, time.monotonic()
        elif time.monotonic() - since > stall_s:
            raise DownloadError(f"no byte came for {stall_s:.0f} s")


def is_refused(error: BaseException) -> bool:
    """Return whether the hub or bucket refuses the files to us, or has none of that name."""
    codes = [_own_code(getattr(cause, "response", None)) for cause in _chain(error)]
    return any(400 <= code < 500 and code not in _PASSING_CODES for code in codes)


def _own_code(response: Any) -> int:
    """Return the code of a response, which is an object of the hub's client or a dict of the bucket's; 0: none.

    One of the storage that the hub names is none of its own: the storage answers 403 once a signed URL has expired, and
    the client resumes a slow download with the same URL.
    """
    from huggingface_hub.constants import ENDPOINT

    if response is None:
        return 0
    if isinstance(response, Mapping):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    first_hop = next(iter(response.history), response)  # a mirror may redirect to another host
    is_own = urlsplit(str(first_hop.url)).hostname == urlsplit(ENDPOINT).hostname
    return int(response.status_code) if is_own else 0


def is_final(error: BaseException) -> bool:
    """Can no later attempt succeed? It cannot if the hub refuses the model or its name, or the claim the files."""
    numbers = {cause.errno for cause in _chain(error) if isinstance(cause, OSError)}
    # A proxy's page in place of the hub's JSON is a ValueError, too, and may be gone soon.
    is_misnamed = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
    return is_refused(error) or is_misnamed or not numbers.isdisjoint(_FINAL_ERRORS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, not what was being handled as it was raised: that need not have caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
