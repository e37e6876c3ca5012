"""What a prefetch Job's pod reports while it downloads a service's hub models into a claim."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outrider_crds.contract import Contract

PREFETCH_SCHEMA = 1
PREFETCH_PATH = "/outrider/prefetch"
"""Page of the pod's admin port."""
PREFETCH_REFUSED = 69
"""Exit code of a download that no second attempt mends, such as a model that is not there or a token that is refused;
EX_UNAVAILABLE of sysexits.h."""
Bytes = Annotated[int, Field(ge=0, le=10**18)]


class PrefetchProgress(Contract):
    schema_version: int = PREFETCH_SCHEMA
    model: Annotated[str, Field(max_length=256)] = ""
    """The model that is being downloaded; empty before the first and after the last."""
    downloaded_bytes: Bytes = 0
    """Bytes of all models that are on the claim."""
    total_bytes: Bytes = 0
    """Bytes of all models, as the hub names them; 0 before it answers."""
    trouble: Annotated[str, Field(max_length=512)] = ""
    """What keeps the download back; it is tried again by itself. Empty while it goes on."""
