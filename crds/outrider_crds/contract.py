"""What operator and runtime of different releases may rely on in the documents that they exchange.

- A document names its schema version. Within a version fields are only added, each with a default.
- A reader leaves out fields that it does not know, at any depth: a newer release wrote them.
- A document of a newer version is refused with a sentence, not misread.
"""

from __future__ import annotations

from typing import Self

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from outrider_crds.base import Model


class Contract(Model):
    """A document between releases; the default of `schema_version` is the newest that this release reads."""

    schema_version: int

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        """The document in JSON `text`, fields of other releases left out. Raises pydantic's ValidationError."""
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
