"""Small files of a model in an S3 bucket, read before an engine starts. vLLM's run:ai streamer reads the weights."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

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
    try:
        from runai_model_streamer import pull_files
    except ImportError:
        what = "runai-model-streamer[s3] is not installed in this image"
        raise OSError(f"model {uri!r} cannot be read: {what}; use podTemplate.image or another source") from None
    folder = Path(tempfile.mkdtemp(prefix="outrider-bucket-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        pull_files(f"{uri.rstrip('/')}/", str(folder), SMALL_FILES)
    except Exception as error:  # the clients' errors share no base class; any of them means "not there"
        raise OSError(f"model {uri!r} cannot be had from its bucket: {error}") from error
    if not (folder / CONFIG_FILE).is_file():
        raise OSError(f"model {uri!r} is not in its bucket: there is no {CONFIG_FILE}; check source.s3.uri")
    return folder
