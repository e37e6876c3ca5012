"""Names of the attention layers that a drafter adds to the engine: vLLM refuses a name that is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock


@contextmanager
def named(module: ModuleType, prefix: str | None) -> Iterator[None]:
    """What `module` loads in here names its layers with `prefix`; None: as vLLM names them."""
    if prefix is None:
        yield
        return
    get_model: Any = vars(module)["get_model"]
    with mock.patch.object(module, "get_model", lambda **keywords: get_model(**{**keywords, "prefix": prefix})):
        yield
