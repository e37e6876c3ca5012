"""Names of what a drafter adds to the engine: vLLM refuses a layer's that is taken, and takes compiled code of one name
for that of one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from vllm.compilation.backends import set_model_tag


@contextmanager
def named(module: ModuleType, prefix: str | None) -> Iterator[None]:
    """What `module` loads in here is called `prefix`, and so begin its layers' names; None: as vLLM names them."""
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
    """Tags that `module` sets for parts of a model in here begin with `prefix`; None: as vLLM has them."""
    if prefix is None:
        yield
        return
    with mock.patch.object(module, "set_model_tag", lambda tag: set_model_tag(f"{prefix}.{tag}")):
        yield
