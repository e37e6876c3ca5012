"""Unique names for a drafter's layers and compiled code.

vLLM refuses a layer name that is in use, and assumes that compiled code of the same name belongs to the same model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.compilation.backends import set_model_tag

from outrider_runtime.vllm_plugin.patches import COMPILED_PARTS, Patch, in_place, original


@contextmanager
def named(loader: Patch, prefix: str | None) -> Iterator[None]:
    """Prefix the layer names of models loaded in this context; None: keep vLLM's names. loader: of `get_model`."""
    if prefix is None:
        yield
        return
    get_model = original(loader)

    def get(**keywords: Any) -> Any:
        with set_model_tag(prefix):
            return get_model(**{**keywords, "prefix": prefix})

    with in_place(loader, get):
        yield


@contextmanager
def tagged(prefix: str | None) -> Iterator[None]:
    """Prefix the tags of the parts of a DFlash2 that is loaded in this context; None: keep vLLM's tags."""
    if prefix is None:
        yield
        return
    with in_place(COMPILED_PARTS, lambda tag: set_model_tag(f"{prefix}.{tag}")):
        yield
