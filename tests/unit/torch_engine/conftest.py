"""A folder with a tiny model and its tokenizer, and the model's answers without a drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_runtime.torch_engine.engine_request import Sampling

from tests.unit.torch_engine.engines import DRAWN, GREEDY, answers, make_harness
from tests.unit.torch_engine.models import write_model
from tests.unit.torch_engine.tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_model(folder, model_type="llama")
    write_tokenizer(folder)
    return folder


@pytest.fixture(
    scope="module", params=[GREEDY, pytest.param(DRAWN, marks=pytest.mark.slow)], ids=["greedy", "drawn with a seed"]
)
def sampling(request: pytest.FixtureRequest) -> Sampling:
    sampling: Sampling = request.param
    return sampling


@pytest.fixture(scope="module")
def plain(models: Path, sampling: Sampling) -> list[list[int]]:
    """Answers of the target of a module's `models`, without a drafter."""
    return answers(make_harness(models / "target"), sampling)
