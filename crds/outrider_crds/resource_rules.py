"""Rules for the accelerator's resource."""

from __future__ import annotations

from outrider_crds.rule import Rule
from outrider_crds.spec import Accelerator

RESOURCE_RULES = (
    Rule(
        on=Accelerator,
        field=".resourceName",
        cel="!self.resourceName.contains('kubernetes.io/') && !self.resourceName.startsWith('requests.')",
        holds=lambda a: "kubernetes.io/" not in a.resource_name and not a.resource_name.startswith("requests."),
        message="resourceName must be a device plugin's resource such as nvidia.com/gpu, not one of Kubernetes' own",
    ),
)
