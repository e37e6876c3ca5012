"""The profiler on the Torch backend: its steps have the requested shapes, and yield a profile without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from outrider_crds.profile import ProfilingResult
from outrider_crds.spec import Accelerator, Backend, Engine, Profiling, ProfilingMode, SpeculativeServiceSpec
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.paths import Paths
from outrider_runtime.profiler.driver import Driver
from outrider_runtime.profiler.engines.torch_engine import ProfilerTorchEngine
from outrider_runtime.profiler.failures import NOISY, TIME_BUDGET_TOO_SMALL
from outrider_runtime.profiler.grid import GridPoint
from outrider_runtime.profiler.host_protocol import VisitOrder
from outrider_runtime.torch_engine.engine_loading import load

from tests.engine import engines
from tests.unit.torch_engine.models import write_head, write_model
from tests.unit.torch_engine.test_engine_loading import boot

SMALL = ["--max-num-seqs=4", "--max-num-batched-tokens=128", "--kv-cache-memory-bytes=2000000"]


@pytest.fixture(scope="module")
def driver(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    tmp_path = tmp_path_factory.mktemp("driver")
    write_head(tmp_path / "head")
    write_model(tmp_path / "draft", seed=3, model_type="llama")
    pool = [engines.lookup(), engines.eagle(tmp_path / "head"), engines.draft_model(tmp_path / "draft")]
    paths = Paths(mounted=False, run_dir=str(tmp_path))
    loaded = load(boot(folder, pool, extra_args=SMALL), engines.hot_config(), paths)
    return Driver(ProfilerTorchEngine(loaded))


def test_driver_reports_limits_and_drafters(driver: Driver) -> None:
    ready = driver.ready()
    assert (ready.limits.max_requests, ready.limits.step_tokens, ready.limits.max_model_len) == (4, 128, 256)
    assert ready.limits.max_draft_tokens == 3
    token_bytes = 2 * 3 * 2 * 6 * 4  # target and draft model: keys and values, layers, heads, numbers, bytes
    assert ready.limits.kv_tokens == 2_000_000 // (2 * token_bytes + token_bytes // 3) // 2
    assert ready.engine_version == f"torch-{torch.__version__}"
    assert {name: drafter.passes for name, drafter in ready.drafters.items()} == {
        "pld": False,
        "eagle": True,
        "draft": True,
    }
    assert ready.pace.step_s > 0


@pytest.mark.parametrize(
    ("point", "drafter", "batched", "mode"),
    [
        (GridPoint(64, 1), None, 1, ExecutionMode.UNIFORM),
        (GridPoint(64, 4, 3), "eagle", 16, ExecutionMode.UNIFORM),
        (GridPoint(64, 2, 3, width=3), "eagle", 8, ExecutionMode.UNIFORM),
        (GridPoint(64, 2, 3, width=4), "draft", 8, ExecutionMode.UNIFORM),
        (GridPoint(64, 4, 3, uneven=True), "draft", 10, ExecutionMode.VARLEN),
        (GridPoint(64, 3, 1, prefill=64), "pld", 70, ExecutionMode.VARLEN),
    ],
)
def test_measured_step_has_the_grid_points_shape(
    driver: Driver, point: GridPoint, drafter: str | None, batched: int, mode: ExecutionMode
) -> None:
    """The step verifies as many tokens as the grid point says, whatever the drafter proposes."""
    visit = driver.visit(VisitOrder(point, drafter, steps=2, most_steps=2))
    assert visit.suspended == ""
    assert len(visit.samples) == 2
    for sample in visit.samples:
        assert sample.shape.n_batched == batched
        assert sample.shape.n_context >= point.batch * point.context
        assert sample.mode is mode
        assert sample.target_s > 0
        assert drafter is None or sample.draft_s[drafter] > 0  # heads may prefill in the same step
        assert sample.draft_tokens == (point.verify if drafter else 0)
        assert sample.draft_width == point.width


@pytest.mark.slow
def test_job_profiles_target_and_drafters_without_vllm(folder: Path, tmp_path: Path) -> None:
    """The command is the Job's: one engine process, and a profile of target and drafters."""
    write_head(tmp_path / "head")
    spec = SpeculativeServiceSpec(
        target=engines.model(folder), draft_pool=[engines.lookup(), engines.eagle(tmp_path / "head")],
        accelerator=Accelerator(products=["cpu"]), engine=Engine(backend=Backend.TORCH, extra_args=SMALL),
        profiling=Profiling(mode=ProfilingMode.REQUIRED),
    )  # fmt: skip
    head = {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeService", "metadata": {"name": "chat"}}
    (tmp_path / "service.yaml").write_text(yaml.safe_dump({**head, "spec": spec.wire()}))
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['vllm'] = None\n")
    for budget_s in (8, 30, 90):  # again, with more time, where the machine was too busy
        ended, result = _profile(tmp_path, budget_s)
        reasons = {failure.reason for failure in result.failures}
        if not reasons & {NOISY, TIME_BUDGET_TOO_SMALL}:
            break
    if reasons == {NOISY}:
        pytest.skip("the machine is too busy for a profile")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert result.failures == [], ended.stdout
    assert result.target is not None
    assert result.target.engine_version == f"torch-{torch.__version__}"
    assert {drafter.name: drafter.autoregressive for drafter in result.drafters} == {"pld": False, "eagle": True}


def _profile(folder: Path, budget_s: int) -> tuple[subprocess.CompletedProcess[str], ProfilingResult]:
    """Run the Job's command on the folder's manifest."""
    ended = subprocess.run(
        [
            sys.executable, "-m", "outrider_runtime.profiler.main", "-f", str(folder / "service.yaml"),
            f"--time-budget={budget_s}s", "--result", str(folder / "result"),
        ],
        env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    return ended, ProfilingResult.model_validate_json((folder / "result").read_bytes())
