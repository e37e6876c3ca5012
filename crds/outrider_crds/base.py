"""Base model and bounded scalar types shared by every Outrider document."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, StringConstraints
from pydantic.alias_generators import to_camel, to_snake
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

# A Go duration ("50ms", "1m30s"). The API server's `format: duration` also takes "1 day" and overflows at 292
# years; within this pattern every text parses, and to the same length here and there.
DURATION_PATTERN = r"^([0-9]{1,5}(\.[0-9]{1,3})?(us|ms|s|m|h)){1,4}$"
Duration = Annotated[
    str,
    StringConstraints(min_length=1, max_length=32, pattern=DURATION_PATTERN),
    Field(json_schema_extra={"format": "duration"}),
]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Percent = Annotated[int, Field(ge=0, le=100)]


class MapList:
    """Marks a list as keyed by fields of its items, here and in the CRD: no two items may have equal keys."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(self.keys)}

    def _check(self, items: list[Any]) -> list[Any]:
        seen: set[tuple[str, ...]] = set()
        for item in items:
            values = tuple(str(getattr(item, to_snake(key))) for key in self.keys)
            if values in seen:
                problem = {"key": " and ".join(self.keys), "value": " and ".join(values)}
                raise PydanticCustomError("duplicate", "Duplicate value: two entries have the {key} {value}", problem)
            seen.add(values)
        return items


class Model(BaseModel):
    """camelCase on the wire, snake_case in code, frozen, and closed: an unknown field is an error."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    def wire(self) -> dict[str, Any]:
        """The JSON form: camelCase, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class KubernetesModel(Model):
    """A Kubernetes type, which goes into a pod as it was written."""

    def wire(self) -> dict[str, Any]:
        """The JSON form, without fields that have their default."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def seconds(duration: str) -> float:
    """Seconds of a Go duration such as "1m30s". Raises ValueError with the text if it is not a duration."""
    parts = _DURATION.findall(duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is not a duration; write it like '50ms', '30s' or '1m30s'")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def digest(document: Any, length: int = 10) -> str:
    """Short stable hash of a JSON document, independent of the order of keys."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
