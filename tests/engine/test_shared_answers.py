"""Suffix drafters of a wider scope in vLLM: finished answers speed up requests of the same scope, and change none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.draft_pool import SuffixScope
from outrider_runtime.drafters.suffix import TENANT_ARGUMENT

from tests.engine.engines import Bench, bench, suffix
from tests.engine.planted_models import counting_llama

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

PROMPT = "The tenant asks for a list of"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose answers repeat little, so that a request's own text has few proposals."""
    return counting_llama(tmp_path_factory.mktemp("shared") / "target", scale=1.8)


@pytest.fixture(scope="module")
def engine(target: Path) -> Iterator[Bench]:
    with bench([suffix(scope=SuffixScope.TENANT)], target=target) as started:
        yield started


def served(engine: Bench, tenant: str | None, **how: Any) -> tuple[int, list[int]]:
    """Accepted tokens of one request, and its answer."""
    engine.fresh()
    engine.loop.pin(3, "suffix")
    sampling = {} if tenant is None else {"extra_args": {TENANT_ARGUMENT: tenant}}
    (tokens,) = engine.run([(PROMPT, sampling)], **how)
    return engine.accepted("suffix"), tokens


def test_answer_is_proposed_to_its_tenant_alone(engine: Bench) -> None:
    """Promise: nothing is kept of an aborted request; a request without tenant neither gives nor gets."""
    served(engine, "a", abort_at={8: "0"})
    alone, answer = served(engine, None)
    assert served(engine, "a") == (alone, answer)
    assert served(engine, "b") == (alone, answer)
    assert served(engine, None) == (alone, answer)
    accepted, again = served(engine, "a")
    assert again == answer
    assert accepted > alone
