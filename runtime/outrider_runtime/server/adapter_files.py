"""Files of LoRA adapters: where they are, what is wrong with them, and a copy that the engine reads.

The engine may read an adapter again at any time, in the midst of serving. So it gets a copy of its own, which does not
change. The copy's path differs at each load, and vLLM's prefix cache knows adapters by name and path: KV that earlier
weights computed is never found for later ones.
"""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider_crds.model_sources import AdapterRepository, AdapterSource, Lora
from outrider_crds.runtime_config import adapters_folder

from outrider_runtime.bucket import SCHEME, pull
from outrider_runtime.error_text import first_line
from outrider_runtime.hub_download import blobs_folder, bytes_in, is_refused

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Files that vLLM looks for, in this order."""

_PREFIX = "outrider-adapters-"


class UnusableAdapterError(Exception):
    """An adapter cannot be loaded; the message is a sentence for the status. is_refused: the hub or bucket said no."""

    def __init__(self, why: str, *, is_refused: bool = False) -> None:
        super().__init__(why)
        self.is_refused = is_refused


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Reads the adapters of one service."""

    lora: Lora
    mounted: bool
    """Whether engine.lora.volume is mounted, as in a pod."""
    copies: Path
    """Folder for the copies."""

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.copies))

    def fill(self, copied: Path, source: AdapterSource) -> None:
        """Copy the adapter into a new folder, which is deleted on errors. Raises UnusableAdapterError."""
        try:
            self._fill(copied, source)
        except Exception:
            shutil.rmtree(copied, ignore_errors=True)
            raise

    def bytes_on_disk(self, copied: Path, source: AdapterSource) -> int:
        """Return the bytes that have come: into the folder, and for one of the hub into its client's cache."""
        cache = [blobs_folder(source.hub.repository)] if source.hub is not None else []
        return bytes_in(copied, *cache)

    def _fill(self, copied: Path, source: AdapterSource) -> None:
        if source.s3 is not None:
            self._fill_from_bucket(copied, source.s3.uri)
            return
        folder, place = self._folder(source)
        _check_config(folder, place, self.lora.max_rank)
        weights = _weights(folder, place)
        try:
            for file in (CONFIG_FILE, weights):
                shutil.copyfile(folder / file, copied / file)
        except OSError as error:
            raise UnusableAdapterError(f"{place} cannot be read: {first_line(error)}") from error

    def _fill_from_bucket(self, copied: Path, uri: str) -> None:
        """Read the config first: an adapter that cannot be hosted is retried, and its weights may be large."""
        _pull(uri, copied, CONFIG_FILE)
        _check_config(copied, uri, self.lora.max_rank)
        _pull(uri, copied, *WEIGHTS_FILES)
        _weights(copied, uri)

    def _folder(self, source: AdapterSource) -> tuple[Path, str]:
        """Return the folder of the adapter, and its name for people."""
        if source.hub is not None:
            return _download(source.hub), f"{source.hub.repository} on the hub"
        if source.folder is None or self.lora.volume is None:
            raise UnusableAdapterError("its source is of no kind that this release knows")
        path = source.folder.path
        return Path(adapters_folder(self.lora.volume, mounted=self.mounted), path.lstrip("/")), path


@contextmanager
def folder_for_copies(*, in_pod: bool) -> Iterator[Path]:
    """Make a folder on disk, and delete it at the end. A pod's containers before this one may have left theirs."""
    if in_pod:
        for stale in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _download(source: AdapterRepository) -> Path:
    from huggingface_hub import snapshot_download  # part of the engine's own installation

    try:
        files = [CONFIG_FILE, *WEIGHTS_FILES]
        return Path(snapshot_download(source.repository, revision=source.revision, allow_patterns=files))
    except Exception as error:  # the hub client's errors share no base class
        why = " ".join(str(error).split())
        sentence = f"{source.repository} cannot be had from the hub: {why}"
        raise UnusableAdapterError(sentence, is_refused=is_refused(error)) from error


def _pull(uri: str, folder: Path, *files: str) -> None:
    """Copy `files` of the bucket's folder `uri`, and none of the folders below it, such as training checkpoints."""
    prefix = uri.removeprefix(SCHEME).partition("/")[2].rstrip("/")
    try:
        pull(uri, uri, folder, [glob.escape(f"{prefix}/{file}" if prefix else file) for file in files])
    except OSError as error:
        raise UnusableAdapterError(" ".join(str(error).split()), is_refused=is_refused(error)) from error


def _check_config(folder: Path, place: str, max_rank: int) -> None:
    """Raise UnusableAdapterError for an adapter that the engine cannot host."""
    config = _config(folder, place)
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnusableAdapterError(f"{place} is an adapter of type {kind}, and the engine hosts LORA alone")
    rank = _rank(config)
    if rank is None:
        raise UnusableAdapterError(f"{CONFIG_FILE} in {place} has no rank: r must be a whole number above 0")
    if rank > max_rank:
        raise UnusableAdapterError(
            f"{place} has rank {rank}, and engine.lora.maxRank is {max_rank}: raise it, which makes a new revision"
        )


def _weights(folder: Path, place: str) -> str:
    """Return the name of the file with the weights. Raises UnusableAdapterError if there is none."""
    weights = next((file for file in WEIGHTS_FILES if (folder / file).is_file()), None)
    if weights is None:
        raise UnusableAdapterError(f"there is no {WEIGHTS_FILES[0]} in {place}")
    return weights


def _config(folder: Path, place: str) -> dict[str, object]:
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnusableAdapterError(f"there is no {CONFIG_FILE} in {place}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableAdapterError(f"{CONFIG_FILE} in {place} cannot be read: {first_line(error)}") from None
    if not isinstance(config, dict):
        raise UnusableAdapterError(f"{CONFIG_FILE} in {place} is no JSON object")
    return config


def _rank(config: dict[str, object]) -> int | None:
    """Return the highest rank of a module; None for values that are no ranks."""
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    whole = [rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool) and rank > 0]
    return max(whole) if len(whole) == len(ranks) else None
