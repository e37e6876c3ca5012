"""Unique names for a drafter's layers and compiled code.

vLLM refuses a layer name that is in use, and assumes that compiled code of the same name belongs to the same model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from vllm.compilation.backends import set_model_tag


@contextmanager
def named(module: ModuleType, prefix: str | None) -> Iterator[None]:
    """Prefix the layer names of models that `module` loads in this context; None: keep vLLM's names."""
    if prefix is None:
        yield
        return
    get_model: Any = vars(module)["get_model"]

    def get(**keywords: Any) -> Any:
        with set_model_tag(prefix):
            return get_model(**{**keywords, "prefix": prefix})

    with mock.patch.object(module, "get_model", get):
        yield


@contextmanager
def tagged(module: ModuleType, prefix: str | None) -> Iterator[None]:
    """Prefix the tags that `module` sets for parts of a model in this context; None: keep vLLM's tags."""
    if prefix is None:
        yield
        return
    with mock.patch.object(module, "set_model_tag", lambda tag: set_model_tag(f"{prefix}.{tag}")):
        yield
