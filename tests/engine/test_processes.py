"""The engine as a pod runs it, in vLLM's own processes: what crosses between them, and a draft that cannot load."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from outrider_crds.runtime_config import HotConfig, config_hash
from outrider_crds.spec import SpeculationMode
from outrider_crds.state import RuntimeState
from outrider_runtime.snapshot import read_snapshot
from outrider_runtime.vllm_plugin import launch

from tests.engine import engines
from tests.engine.engines import EAGLE_HEAD, eagle, hot_config, lookup, make_plan, own_environment

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cut_head(tmp_path: Path) -> Path:
    """An EAGLE-3 head whose download stopped half way: its config is fine, its weights are not."""
    folder = tmp_path / "head"
    shutil.copytree(EAGLE_HEAD, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return folder


def wait_for(run_dir: str, wanted: Callable[[RuntimeState], bool], what: str) -> RuntimeState:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        state = read_snapshot(run_dir)
        if state is not None and wanted(state):
            return state
        time.sleep(0.1)
    raise AssertionError(f"the state never showed {what}: {read_snapshot(run_dir)}")


def test_a_draft_that_cannot_load_is_dropped_and_the_pod_serves(cut_head: Path) -> None:
    """Promise: dropped, named with its reason, and the rest works: orders, reports, state and hot config cross."""
    with own_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", OMP_NUM_THREADS="1"):
        plan = make_plan([lookup(), eagle(cut_head)])
        launch.prepare(plan)
        with pytest.raises(Exception, match=r"(?i)engine core|worker"):  # vLLM says no more than that
            engines.start(launch.engine_arguments(plan))

        smaller = launch.after_failure(plan)
        assert smaller is not None, "the worker left no note"
        assert "cannot be loaded" in smaller.pool.dropped["eagle"]
        launch.prepare(smaller)
        llm = engines.start(launch.engine_arguments(smaller))
        try:
            serves_and_reports(llm, smaller)
        finally:
            llm.llm_engine.engine_core.shutdown()


def serves_and_reports(llm: object, plan: launch.LaunchPlan) -> None:
    generate(llm)
    state = wait_for(plan.paths.run_dir, lambda state: state.output_tokens >= 96, "the tokens")
    assert state.plugin_active
    drafters = {drafter.name: drafter for drafter in state.drafters}
    assert drafters["pld"].loaded
    assert drafters["pld"].verified > 0
    assert not drafters["eagle"].loaded
    assert next(one for one in state.slo_classes if one.name == "chat").finished == 3

    off = hot_config(SpeculationMode.OFF)
    write_hot(plan, off)
    state = wait_for(plan.paths.run_dir, lambda state: state.config_hash == config_hash(off), "the new hot config")
    proposed = state.proposed_tokens
    generate(llm)
    state = wait_for(plan.paths.run_dir, lambda state: state.output_tokens >= 192, "the second round")
    assert state.proposed_tokens == proposed, "mode Off takes effect without a restart"


def generate(llm: object) -> None:
    from vllm import LLM, SamplingParams

    assert isinstance(llm, LLM)
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    llm.generate(
        ["one two three one two three one two", "a b c d a b c d a b", "x y z x y z x y"], greedy, use_tqdm=False
    )


def write_hot(plan: launch.LaunchPlan, hot: HotConfig) -> None:
    path = Path(plan.paths.hot_file)
    path.with_suffix(".new").write_text(json.dumps(hot.wire()))
    path.with_suffix(".new").rename(path)
