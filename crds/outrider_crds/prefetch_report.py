"""What a prefetch Job's pod reports while it downloads a service's hub models into a claim."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider_crds.contract import Contract

PREFETCH_SCHEMA = 1
PREFETCH_PATH = "/outrider/prefetch"
"""Page of the pod's admin port."""
Bytes = Annotated[int, Field(ge=0, le=10**18)]


class PrefetchProgress(Contract):
    schema_version: int = PREFETCH_SCHEMA
    model: Annotated[str, Field(max_length=256)] = ""
    """The model that is being downloaded; empty before the first and after the last."""
    downloaded_bytes: Bytes = 0
    """Bytes of all models that are on the claim."""
    total_bytes: Bytes = 0
    """Bytes of all models, as the hub names them; 0 before it answers."""
