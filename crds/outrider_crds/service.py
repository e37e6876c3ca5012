"""The `SpeculativeService` object as it stands in a manifest and on the API server."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from outrider_crds.base import Model
from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import SpeculativeServiceStatus


class ObjectMeta(Model):
    """The part of Kubernetes' object metadata that Outrider reads; the rest is ignored."""

    model_config = ConfigDict(extra="ignore")

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class SpeculativeService(Model):
    """Serves a large language model with speculative decoding that tunes itself."""

    api_version: Literal["outrider.dev/v1alpha1"] = "outrider.dev/v1alpha1"
    kind: Literal["SpeculativeService"] = "SpeculativeService"
    metadata: ObjectMeta
    spec: SpeculativeServiceSpec
    """What to serve, on what, and how fast."""
    status: SpeculativeServiceStatus = SpeculativeServiceStatus()
    """What Outrider observed."""
