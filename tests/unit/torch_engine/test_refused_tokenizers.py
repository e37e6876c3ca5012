"""Unfit tokenizers and generation configurations are refused when the server starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.text import Text

from tests.unit.torch_engine.models import VOCABULARY, write_model
from tests.unit.torch_engine.tokenizers import write_tokenizer


def test_tokenizer_of_other_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, model_type="llama")
    write_tokenizer(tmp_path, VOCABULARY + 5)
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json has a token 100, and vocab_size .* is 96"):
        Text(tmp_path, VOCABULARY)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'"), ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"), ({"top_k": "x"}, "top_k is 'x'"),
        ({"top_k": [1]}, r"top_k is \[1\]"), ({"top_p": 0}, "top_p is 0"), ({"top_p": True}, "top_p is True"),
        ({"min_p": 5}, "min_p is 5"), ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"), ({"eos_token_id": [["a"]]}, r"eos_token_id is \[\['a'\]\]"),
        ({"eos_token_id": {}}, "eos_token_id is {}"), ([1], "is not a JSON object"),
    ],
)  # fmt: skip
def test_invalid_generation_config_is_refused_at_start(folder: Path, tmp_path: Path, document: Any, named: str) -> None:
    """Bug: the server started, and every request failed with a 500."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match=f"{file}.*{named}"):
        Text(tmp_path, VOCABULARY)


def test_truncated_tokenizer_is_refused_by_folder(tmp_path: Path) -> None:
    write_model(tmp_path, model_type="llama")
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text()[:-40])
    with pytest.raises(UnsupportedModelError, match=f"{tmp_path} has no usable tokenizer"):
        Text(tmp_path, VOCABULARY)
