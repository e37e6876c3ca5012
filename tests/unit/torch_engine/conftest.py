"""A tiny model with its tokenizer, as it lies in a folder, and what it answers without a drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.torch_engine.engine_request import Sampling

from tests.unit.torch_engine.engines import DRAWN, GREEDY, answers, bench
from tests.unit.torch_engine.models import write_model
from tests.unit.torch_engine.tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("target")
    write_model(where, model_type="llama")
    write_tokenizer(where)
    return where


@pytest.fixture(
    scope="module", params=[GREEDY, pytest.param(DRAWN, marks=pytest.mark.slow)], ids=["greedy", "drawn with a seed"]
)
def sampling(request: pytest.FixtureRequest) -> Sampling:
    made: Sampling = request.param
    return made


@pytest.fixture(scope="module")
def plain(models: Path, sampling: Sampling) -> list[list[int]]:
    """What the target of a module's `models` answers without a drafter."""
    return answers(bench(models / "target"), sampling)
