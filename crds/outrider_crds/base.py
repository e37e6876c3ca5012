"""Base model and bounded scalar types shared by every Outrider document."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, StringConstraints
from pydantic.alias_generators import to_camel
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
NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
Name = Annotated[str, StringConstraints(min_length=1, max_length=40, pattern=NAME_PATTERN)]
# A label value that is also a folder name in the pod.
Product = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
# A label key or an extended resource: an optional domain, a slash and a name.
QualifiedName = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=253,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Percent = Annotated[int, Field(ge=0, le=100)]


@dataclass(frozen=True)
class MapList:
    """Marks a list as keyed by one field of its items: no two items may share the value, here and in the CRD."""

    key: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}

    def _check(self, items: list[Any]) -> list[Any]:
        seen: set[str] = set()
        for item in items:
            value = str(item[self.key] if isinstance(item, dict) else getattr(item, self.key))
            if value in seen:
                problem = {"key": self.key, "value": value}
                raise PydanticCustomError("duplicate", "Duplicate value: two entries have the {key} {value}", problem)
            seen.add(value)
        return items


class Model(BaseModel):
    """camelCase on the wire, snake_case in code, frozen, and closed: an unknown field is an error."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    def wire(self) -> dict[str, Any]:
        """The JSON form: camelCase, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def seconds(duration: str) -> float:
    """Seconds of a Go duration such as "1m30s". Raises ValueError naming the text when it is not one."""
    parts = _DURATION.findall(duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is not a duration; write it like '50ms', '30s' or '1m30s'")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def digest(document: Any, length: int = 10) -> str:
    """Short stable hash of a JSON document; equal documents hash equally whatever the key order."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
