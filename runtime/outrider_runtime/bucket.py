"""Files in an S3 bucket: the small ones of a model, read before an engine starts, and adapters. vLLM's run:ai streamer
reads the weights of models."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from outrider_runtime.error_text import without_secrets
from outrider_runtime.model_config import CONFIG_FILE

SCHEME = "s3://"
LOAD_FORMAT = "runai_streamer"
"""vLLM's name for the loader that reads buckets; it reads folders and the hub as well."""
SMALL_FILES = ["*.json"]


def is_bucket(location: str) -> bool:
    return location.startswith(SCHEME)


@functools.cache
def bucket_folder(uri: str) -> Path:
    """A folder with the model's config and tokenizer, which goes with the process. Raises OSError with a sentence."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-bucket-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = f"model {without_secrets(uri)!r}"
    pull(model, uri, folder, SMALL_FILES)
    if not (folder / CONFIG_FILE).is_file():
        raise OSError(f"{model} is not in its bucket: there is no {CONFIG_FILE}; check source.s3.uri")
    return folder


def pull(what: str, uri: str, folder: Path, patterns: list[str]) -> None:
    """Copy files of the bucket's folder `uri` into `folder`. Raises OSError with a sentence about `what`.

    patterns: of whole keys; `*` matches slashes as well.
    """
    try:
        from runai_model_streamer import pull_files
    except ImportError:
        missing = "runai-model-streamer[s3] is not installed in this image"
        raise OSError(f"{what} cannot be read: {missing}; use podTemplate.image or another source") from None
    try:
        pull_files(f"{uri.rstrip('/')}/", str(folder), patterns)
    except Exception as error:  # the clients' errors share no base class; any of them means "not there"
        raise OSError(f"{what} cannot be had from its bucket: {error}") from error
