"""Compatibility of the documents that operator and runtime of different releases exchange.

- A document has a schema version. Within a version fields are only added, each with a default.
- A reader ignores unknown fields at any depth: a newer release wrote them.
- A document of a newer schema version is refused with a sentence.
"""

from __future__ import annotations

from typing import Self

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from outrider_crds.base import Model


class Contract(Model):
    """A document between releases. The default of `schema_version` is the newest version that this release reads."""

    schema_version: int

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        """The document in JSON `text` without unknown fields. Raises pydantic's ValidationError."""
        return cls.model_validate_json(text, extra="ignore")

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
