"""Compatibility of the documents that operator and runtime of different releases exchange.

- A document has a schema version. Within a version fields are only added, each with a default.
- A reader ignores unknown fields at any depth: a newer release wrote them.
- A document of a newer schema version is refused with a sentence.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import ValidationError, field_validator
from pydantic_core import PydanticCustomError, from_json, to_json

from outrider_crds.base import Model

_MOST_UNKNOWN = 64
"""Values that are left out of one document, at most."""


class Contract(Model):
    """A document between releases. The default of `schema_version` is the newest version that this release reads."""

    schema_version: int

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        """The document in JSON `text` without unknown fields. Raises pydantic's ValidationError."""
        return cls.model_validate_json(text, extra="ignore")

    @classmethod
    def read_known(cls, text: str | bytes) -> Self:
        """The document without the fields, and without the items of lists, that have a value which this release does
        not know. Raises pydantic's ValidationError if it is not legible without them."""
        document, problems = from_json(text), 0
        while True:
            try:
                return cls.read(to_json(document))
            except ValidationError as error:
                problems += 1
                place = error.errors(include_url=False, include_context=False)[0]["loc"]
                if problems > _MOST_UNKNOWN or place == ("schemaVersion",) or not _is_left_out(document, place):
                    raise

    @field_validator("schema_version")
    @classmethod
    def _readable(cls, version: int) -> int:
        newest = cls.model_fields["schema_version"].default
        if not 1 <= version <= newest:
            known = {"version": version, "newest": newest}
            raise PydanticCustomError(
                "schema_version", "is {version}, and this release reads 1 to {newest}: upgrade the reading side", known
            )
        return version


def _is_left_out(document: Any, place: tuple[int | str, ...]) -> bool:
    """Remove the item of the first list on the way to `place`, else the value at `place`."""
    for depth, key in enumerate(place, start=1):
        there = isinstance(document, list) and isinstance(key, int) and key < len(document)
        if not (there or (isinstance(document, dict) and key in document)):
            return False
        if there or depth == len(place):
            del document[key]
            return True
        document = document[key]
    return False
