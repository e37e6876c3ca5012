"""Writes the CustomResourceDefinition, in the chart's files, from the models.

`outrider-crds` writes, `outrider-crds --check` compares.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from outrider_crds.conditions import ConditionType
from outrider_crds.rules import RULES
from outrider_crds.schema import JsonObject, structural_schema
from outrider_crds.service import SpeculativeService
from outrider_crds.spec import API_GROUP, API_VERSION, KIND, PLURAL, SpeculativeServiceSpec
from outrider_crds.status import SpeculativeServiceStatus

CRD_NAME = f"{PLURAL}.{API_GROUP}"
REPOSITORY = Path(__file__).resolve().parents[2]
CRD_FILE = REPOSITORY / "charts" / "outrider" / "files" / f"{CRD_NAME}.yaml"  # a chart reads its own folder only
_HEADER = "# Generated from crds/outrider_crds by `outrider-crds`: change the models there, not this file.\n"


def crd() -> JsonObject:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # Uninstalling the chart leaves the CRD, and with it the services and their pods.
        "metadata": {"name": CRD_NAME, "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": API_GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["specsvc"],
                "categories": ["all"],
            },
            "versions": [_version()],
        },
    }


def _version() -> JsonObject:
    return {
        "name": API_VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": _printer_columns(),
    }


def root_schema() -> JsonObject:
    """OpenAPI v3 schema of the resource."""
    return {
        "description": SpeculativeService.__doc__,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Always outrider.dev/v1alpha1."},
            "kind": {"type": "string", "description": "Always SpeculativeService."},
            "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
            "spec": structural_schema(SpeculativeServiceSpec, _validations),
            # Without a status kstatus calls an object current: `helm --wait` would end before the first look.
            "status": {
                **structural_schema(SpeculativeServiceStatus, _validations),
                "default": {"observedGeneration": SpeculativeServiceStatus().observed_generation},
            },
        },
        "x-kubernetes-validations": _validations(KIND),
    }


def _validations(model: str) -> list[dict[str, str]]:
    return [rule.for_api_server() for rule in RULES if rule.on.__name__ == model]


def _printer_columns() -> list[JsonObject]:
    ready = f'.status.conditions[?(@.type=="{ConditionType.READY}")].status'
    return [
        _column("Target", ".spec.target.name", "The model that is served."),
        _column("Accelerator", ".status.accelerator", "Hardware that pods may run on."),
        _column("Ready", ready, "Whether at least one endpoint is ready."),
        _column("Replicas", ".status.readyReplicas", "Pods that answer.", kind="integer"),
        _column("Goodput", ".status.summary.goodput", "Tokens that reach users, per second, over all pods."),
        _column("Speedup", ".status.summary.speedup", "Measured against the same pods without speculation."),
        _column("Acceptance", ".status.summary.acceptance", "Share of tried draft tokens that the target accepted."),
        _column("SLO", ".status.summary.slo", "Attainment of the worst SLO class."),
        _column("Rollout", ".status.rollout.summary", "The draft canary: its phase, requests of each arm, and gain."),
        # In `kubectl get -o wide`: which services a new release has left behind.
        _column("Upgrade", ".status.newerRuntimeImage", "Runtime image that it could move to.", priority=1),
        _column("Age", ".metadata.creationTimestamp", "Time since creation.", kind="date"),
    ]


def _column(name: str, path: str, description: str, *, kind: str = "string", priority: int = 0) -> JsonObject:
    column: JsonObject = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


class _Dumper(yaml.SafeDumper):
    """Repeats what is equal instead of writing YAML anchors."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def crd_text() -> str:
    """The file's text."""
    body: str = yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)
    return _HEADER + body


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="outrider-crds", description="Write the CustomResourceDefinition.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the file is not up to date")
    parser.add_argument("--output", type=Path, default=CRD_FILE, help="the file (default: the repository's)")
    options = parser.parse_args(arguments)
    if options.check:
        if options.output.exists() and options.output.read_text() == crd_text():
            return 0
        print(f"{options.output} differs from the models: run `outrider-crds` and commit it", file=sys.stderr)
        return 1
    options.output.write_text(crd_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
