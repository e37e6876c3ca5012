"""vLLM's config with Outrider installed: what is set, and what is left of it when Outrider steps aside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from outrider_runtime.vllm_plugin.arguments import SCHEDULER_CLASS

from tests.engine.stock_cli import CPU, ENGINE_VARIABLES

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Scheduler, speculative method and reason, by case."""
    folder = tmp_path_factory.mktemp("cases")
    own = {name: value for name, value in os.environ.items() if name not in ENGINE_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.takeover_cases", str(folder)],
        capture_output=True, text=True, check=False, env={**own, **CPU}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    cases: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return cases


@pytest.mark.parametrize("flags", ["plain", "users lookup", "lora"])
def test_default_flags_get_the_lookup(seen: dict[str, list[Any]], flags: str) -> None:
    assert seen[flags] == [SCHEDULER_CLASS, "ngram", "the engine is starting"]


@pytest.mark.parametrize(
    ("name", "scheduler", "method", "sentence"),
    [
        ("broken file", None, "ngram", "broken.yaml: line 1"),
        ("read-only", None, None, "set OUTRIDER_RUN_DIR to a writable folder"),
        ("other scheduler", "vllm.v1.core.sched.scheduler.Scheduler", None, "set by a flag or another plugin"),
        ("changed by another plugin", None, None, "another plugin set the scheduler to other.Scheduler"),
        ("untested", None, "ngram", "was tested with 0.1.* only"),
        ("not hosted", "ImportError", None, "the method suffix, which Outrider does not host"),
        ("missing head", "ValidationError", None, "folder /nowhere/head has no config.json"),
    ],
)
def test_user_flags_stay_when_outrider_steps_aside(
    seen: dict[str, list[Any]], name: str, scheduler: str | None, method: str | None, sentence: str
) -> None:
    """vLLM alone refuses the flags of the last two cases as well."""
    assert seen[name][:2] == [scheduler, method]
    assert sentence in seen[name][2]


def test_engine_that_does_not_start_is_vllms_own(seen: dict[str, list[Any]]) -> None:
    """Nothing of Outrider is left in the process: neither patches nor variables, nor the second runner."""
    check = "SamplingParams._validate_spec_decode"
    assert seen["not started"] == [None, "ngram", "RuntimeError: no engine today", check, "", False]


def test_strict_user_gets_an_error(seen: dict[str, list[Any]]) -> None:
    (sentence,) = seen["strict"]
    assert sentence.startswith(
        "Outrider cannot be active, and OUTRIDER_STRICT is set: the scheduler is other.Scheduler"
    )


def test_offline_use_is_left_alone(seen: dict[str, list[Any]]) -> None:
    assert seen["offline"][:2] == [None, None]
