"""`spec.workload`: pods that another workload makes, and the file that configures Outrider's plugin in them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from outrider_crds.base import Model
from outrider_crds.names import LabelValue


class Scheme(StrEnum):
    HTTP = "HTTP"
    HTTPS = "HTTPS"


class PodSelector(Model):
    match_labels: Annotated[dict[str, LabelValue], Field(min_length=1, max_length=8)]
    """Labels that all of the pods have, and no other pods of the namespace."""

    def __str__(self) -> str:
        """The selector as the API takes it."""
        return ",".join(f"{name}={value}" for name, value in sorted(self.match_labels.items()))


class ExistingPods(Model):
    pod_selector: PodSelector
    """Selects the pods. No other SpeculativeService may select them."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port of `vllm serve` in the pods, which has /outrider/state."""
    scheme: Scheme = Scheme.HTTP
    """HTTPS for pods that serve with a certificate of their own, which is not checked."""


class WorkloadForm(Model):
    existing: ExistingPods
    """Pods that another workload makes: `vllm serve` with the plugin. Outrider writes one ConfigMap for them,
    NAME-config with the key outrider.yaml, reads their state, and restarts nothing."""


CONFIG_FILE_KEY = "outrider.yaml"
CONFIG_FILE_FIELDS = ("draftPool", "sloClasses", "defaultSLOClass", "speculation")
"""Fields of a spec that the file of OUTRIDER_CONFIG may have."""


def config_file(spec: Model) -> dict[str, Any]:
    """The part of a service's `spec` that OUTRIDER_CONFIG reads."""
    fields = spec.wire()
    return {name: fields[name] for name in CONFIG_FILE_FIELDS if name in fields}
