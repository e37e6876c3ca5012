"""A manifest without an API server: the same verdict, the same defaults, and every problem in a sentence."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import ValidationError

from outrider_crds.rules import violations
from outrider_crds.schema import JsonObject, structural_schema
from outrider_crds.schema_errors import sentences
from outrider_crds.service import ObjectMeta, SpeculativeService
from outrider_crds.spec import API_GROUP, API_VERSION, KIND, SpeculativeServiceSpec
from outrider_crds.yaml_text import YamlTextError, read_documents

_API = f"{API_GROUP}/{API_VERSION}"
_TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")
_METADATA = (
    "name", "namespace", "labels", "annotations", "finalizers", "generateName", "ownerReferences", "uid",
    "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
    "managedFields", "selfLink",
)  # fmt: skip


class ManifestError(ValueError):
    """The manifest is not a valid SpeculativeService; `problems` holds a sentence for each thing that is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_manifest(text: str) -> SpeculativeService:
    """The one SpeculativeService in the YAML `text`, validated and defaulted. Raises ManifestError."""
    document = _only_service(text)
    name_problems = _metadata_problems(document)
    spec, spec_problems = _spec(document.get("spec"))
    if spec is None or name_problems:
        raise ManifestError([*_unknown_top_level(document), *name_problems, *spec_problems])
    service = SpeculativeService(metadata=ObjectMeta.model_validate(document["metadata"]), spec=spec)
    problems = [*_unknown_top_level(document), *violations(service)]
    if problems:
        raise ManifestError(problems)
    return service


def _only_service(text: str) -> JsonObject:
    try:
        documents = read_documents(text)
    except YamlTextError as error:
        raise ManifestError([f"manifest: is not YAML: {error}"]) from None
    services = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if len(services) != 1:
        count = f"{len(services)} documents of kind {KIND} among {len(documents)}"
        raise ManifestError([f"manifest: holds {count}: it must hold exactly one, with kind: {KIND}"])
    if services[0].get("apiVersion") != _API:
        raise ManifestError([f"apiVersion: must be {_API}, but is {services[0].get('apiVersion')!r}"])
    return services[0]


def _unknown_top_level(document: JsonObject) -> list[str]:
    return [f"{key}: is not a field: known are {', '.join(_TOP_LEVEL)}" for key in document if key not in _TOP_LEVEL]


def _metadata_problems(document: JsonObject) -> list[str]:
    metadata = document.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return ["metadata.name: is required: name the service, in quotes where YAML would read a number"]
    unknown = [f"metadata.{key}: is not a field of metadata: remove it" for key in metadata if key not in _METADATA]
    try:
        ObjectMeta.model_validate_json(json.dumps(metadata), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        return [*unknown, *sentences(error, {}, "metadata")]
    return unknown


def _spec(value: Any) -> tuple[SpeculativeServiceSpec | None, list[str]]:
    if value is None:
        return None, ["spec: is required: add it"]
    schema = _spec_schema()
    try:
        document = json.dumps(_without_nulls(value, schema))
        return SpeculativeServiceSpec.model_validate_json(document, strict=True, by_alias=True, by_name=False), []
    except ValidationError as error:
        return None, sentences(error, schema, "spec")


@cache
def _spec_schema() -> JsonObject:
    return structural_schema(SpeculativeServiceSpec, lambda _: [])


def _without_nulls(value: Any, schema: JsonObject | None) -> Any:
    """`value` without the nulls that the API server drops: those of known fields and of map values."""
    if isinstance(value, list):
        items = (schema or {}).get("items")
        return [_without_nulls(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: _field_schema(key, schema) for key in value}
    return {
        key: _without_nulls(item, fields[key]) for key, item in value.items() if item is not None or fields[key] is None
    }


def _field_schema(key: str, schema: JsonObject | None) -> JsonObject | None:
    if schema is None:
        return None
    field: JsonObject | None = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
    return field
