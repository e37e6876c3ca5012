"""What is said of an error in one line."""

from __future__ import annotations

import pytest
from outrider_runtime.error_text import first_line, with_type
from pydantic import BaseModel, ValidationError, field_validator


class Config(BaseModel):
    model: str

    @field_validator("model")
    @classmethod
    def known(cls, _model: str) -> str:
        raise ValueError("model type `bogus` is not recognised\n\nYou can update")


def test_refused_config_is_reported_with_field_and_cause() -> None:
    """Bug: a draft of an unknown architecture was dropped for "1 validation error for SpeculativeConfig"."""
    with pytest.raises(ValidationError) as refused:
        Config(model="x")
    assert first_line(refused.value) == "model: Value error, model type `bogus` is not recognised"
    assert with_type(refused.value) == "ValidationError: model: Value error, model type `bogus` is not recognised"


def test_long_or_empty_error_text_makes_one_line() -> None:
    assert with_type(RuntimeError("out of memory\n at line 3")) == "RuntimeError: out of memory"
    assert with_type(AssertionError()) == "AssertionError"
    assert len(with_type(ValueError("long " * 1000))) <= 300
