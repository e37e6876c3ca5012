"""Base model and bounded scalar types shared by every Outrider document."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

# A Go duration ("50ms", "1m30s"); the API server parses the same with `format: duration`.
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$"
Duration = Annotated[
    str,
    StringConstraints(min_length=1, max_length=32, pattern=DURATION_PATTERN),
    Field(json_schema_extra={"format": "duration"}),
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=40, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Percent = Annotated[int, Field(ge=0, le=100)]


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
