"""One validation rule in its two forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider_crds.base import Model


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Holds for every `on` in a resource; `cel` sees it as `self`, after defaulting."""

    on: type[Model]
    cel: str
    holds: Callable[[Any], bool]
    """The same as `cel`, over the model."""
    message: str
    """One sentence: what is wrong and what to do."""
    field: str = ""
    """Where below `on` to point, for example ".accelerator.count"."""

    def for_api_server(self) -> dict[str, str]:
        """The entry of `x-kubernetes-validations`."""
        location = {"fieldPath": self.field} if self.field else {}
        return {"rule": self.cel, "message": self.message, **location}
