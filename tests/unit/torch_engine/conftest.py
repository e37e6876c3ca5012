"""A tiny model with its tokenizer, as it lies in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.torch_engine.models import write_model
from tests.unit.torch_engine.tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("target")
    write_model(where, model_type="llama")
    write_tokenizer(where)
    return where
