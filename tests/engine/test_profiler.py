"""`outrider-profile` with real vLLM, planted models or a few layers of SmolLM2, as the Job runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from outrider_crds.profile import ProfileExecutionMode, ProfilingResult
from outrider_runtime.identity import engine_version, weights_commit
from outrider_runtime.profiler.failures import NOISY, TIME_BUDGET_TOO_SMALL

from tests.engine import planted_models
from tests.engine.engines import SMALL, SMALL_LAYERS, head_reading, windowed
from tests.engine.server_process import PATIENCE_S

pytestmark = pytest.mark.model

TARGET_LAYERS = 8
"""A step of so many layers clearly takes longer than the head's pass."""
TOO_BUSY = {NOISY, TIME_BUDGET_TOO_SMALL}
MANIFEST = """
apiVersion: outrider.dev/v1alpha1
kind: SpeculativeService
metadata: {{name: chat}}
spec:
  target: {{name: smollm2, source: {{hostPath: {{path: {target}}}}}}}
  draftPool:
  - {{name: lookup, method: PromptLookup, promptLookup: {{}}}}
  - {{name: eagle, method: Eagle, eagle: {{model: {{name: head, source: {{hostPath: {{path: {head}}}}}}}}}}}
  accelerator: {{products: [cpu]}}
  speculation: {{maxDraftTokens: 3}}
  engine:
    maxModelLen: 512
    extraArgs: [--max-num-seqs=8, --max-num-batched-tokens=512, --enforce-eager]
    env: [{{name: VLLM_CPU_KVCACHE_SPACE, value: "1"}}]
"""


@dataclass(frozen=True)
class Ran:
    code: int
    output: str
    result: ProfilingResult


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return planted_models.counting_llama(folder / "target", TARGET_LAYERS)


@pytest.fixture(scope="module")
def manifest(target: Path, models: planted_models.Counting) -> str:
    return MANIFEST.format(target=target, head=models.head)


def command(folder: Path, text: str, *arguments: str) -> list[str]:
    """The profiler's command line. text: its manifest, which is written to `folder`."""
    manifest = folder / "service.yaml"
    manifest.write_text(text)
    program = [sys.executable, "-m", "outrider_runtime.profiler.main", "-f", str(manifest)]
    return [*program, "--result", str(folder / "termination-log"), *arguments]


def profile(folder: Path, text: str, *arguments: str) -> Ran:
    ended = subprocess.run(command(folder, text, *arguments), capture_output=True, text=True, timeout=PATIENCE_S)
    message = (folder / "termination-log").read_bytes()
    assert len(message) <= 4096
    return Ran(ended.returncode, ended.stdout + ended.stderr, ProfilingResult.model_validate_json(message))


def unhurried(folder: Path, text: str, budget_s: int, *arguments: str) -> Ran:
    """Again, with more time, where the machine was too busy for a profile: that is a finding about the machine."""
    for times in (1, 5, 10):
        ran = profile(folder, text, *arguments, f"--time-budget={times * budget_s}s")
        if not TOO_BUSY & {failure.reason for failure in ran.result.failures}:
            break
    return ran


@pytest.fixture(scope="module")
def whole(manifest: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    """Target, prompt lookup and EAGLE-3, measured once for the tests below."""
    folder = tmp_path_factory.mktemp("profile")
    return unhurried(folder, manifest, 10, "--report", str(folder / "report")), folder / "report"


def test_target_and_drafters_are_measured_and_identified(whole, target, models):
    """One run gives the coefficients of all three, and says what they were measured on."""
    ran, _ = whole
    assert ran.code == 0, ran.output
    assert ran.result.failures == [], ran.output
    measured = ran.result.target
    assert measured is not None
    assert measured.engine_version == engine_version()
    assert measured.device
    assert measured.commit == weights_commit(str(target))
    assert ProfileExecutionMode.UNIFORM in measured.costs
    assert 1e-3 < measured.costs[ProfileExecutionMode.UNIFORM].constant_s < 1
    drafters = {drafter.name: drafter for drafter in ran.result.drafters}
    assert set(drafters) == {"lookup", "eagle"}
    assert drafters["eagle"].autoregressive
    assert drafters["eagle"].commit == weights_commit(str(models.head))


def test_lookup_is_cheaper_than_a_pass_and_a_pass_than_a_step(whole):
    """What the choice of lengths rests on: a mix-up of the two clocks would show here."""
    costs = {drafter.name: drafter.cost for drafter in whole[0].result.drafters}
    target = whole[0].result.target.costs[ProfileExecutionMode.UNIFORM]
    pass_s = {name: cost.constant_s + cost.per_request_s + cost.per_batched_token_s for name, cost in costs.items()}
    step = target.constant_s + target.per_request_s + target.per_batched_token_s
    assert pass_s["lookup"] < pass_s["eagle"] < step


def test_error_is_measured_on_held_out_shapes(whole):
    """The figure in the status is one that the fit did not see; it may be large on a noisy machine, never absent."""
    ran, report = whole
    shapes = json.loads((report / "report.json").read_text())["shapes"]
    held_out = [shape for fit in shapes.values() for shape in fit if shape["heldOut"]]
    assert len(held_out) >= 2
    assert ran.result.target.error_percent < 60
    assert "held-out error" in ran.output


def test_profiler_prints_progress_and_a_report(whole):
    """Shape k of n, time elapsed and budget left while it runs; table, JSON and plot in the end."""
    ran, report = whole
    assert "shape 1 of " in ran.output
    assert "of the budget left" in ran.output
    assert "predicted" in ran.output
    assert (report / "report.png").stat().st_size > 10_000


def test_added_drafters_are_measured_without_the_target(manifest, tmp_path):
    """A patched-in draft costs one drafter's measurement: the target's grid is left alone, as are the other drafters.
    Feeding a block draft is measured apart from its pass."""
    sizes = planted_models.COUNTING_SIZES | {"num_hidden_layers": TARGET_LAYERS}
    source = {"hostPath": {"path": str(planted_models.dflash(tmp_path / "flash", **sizes))}}
    service = yaml.safe_load(manifest)
    service["spec"]["draftPool"] += [
        {"name": "flash", "method": "Block", "block": {"model": {"name": "flash", "source": source}}}
    ]
    ran = unhurried(tmp_path, yaml.safe_dump(service), 14, "--drafter", "eagle", "--drafter", "flash")
    assert ran.code == 0, ran.output
    assert ran.result.target is None
    assert ran.result.failures == []
    drafters = {drafter.name: drafter for drafter in ran.result.drafters}
    assert {name: drafter.autoregressive for name, drafter in drafters.items()} == {"eagle": True, "flash": False}
    fed_s, proposed_s = first_and_later_pass_s(drafters["flash"])
    assert 0 < fed_s < proposed_s, "a projection of the context, and the pass of the whole block"


def test_mtp_is_measured_without_the_target(target, tmp_path):
    """It has no checkpoint of its own, and is fed with its first pass."""
    mimo = planted_models.mimo(tmp_path / "mimo", target)
    service = yaml.safe_load(MANIFEST.format(target=mimo, head="nowhere"))
    service["spec"]["draftPool"][1:] = [{"name": "mtp", "method": "MTP", "mtp": {}}]
    ran = unhurried(tmp_path, yaml.safe_dump(service), 4, "--drafter", "mtp")
    assert ran.code == 0, ran.output
    assert ran.result.target is None
    (measured,) = ran.result.drafters
    assert (measured.name, measured.autoregressive) == ("mtp", True)
    assert first_and_later_pass_s(measured)[1] > 0


def first_and_later_pass_s(drafter):
    return [cost.constant_s + 8 * cost.per_batched_token_s for cost in (drafter.first_pass, drafter.cost)]


def test_head_with_broken_weights_fails_alone_with_a_reason(tmp_path):
    """Its config is right, so only the engine finds out."""
    head = head_reading(SMALL_LAYERS, tmp_path / "broken")
    (head / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    ran = profile(tmp_path, MANIFEST.format(target=SMALL, head=head), "--drafter", "eagle", "--time-budget", "10s")
    assert ran.code == 1
    assert [(failure.reason, failure.drafter) for failure in ran.result.failures] == [("DrafterFailed", "eagle")]
    assert "damaged or cut off" in ran.result.failures[0].message


def test_target_is_measured_even_if_its_only_drafter_fails(target, tmp_path):
    """Bug: without proposals in shapes that need them, the target read tokens that are none."""
    pool = yaml.safe_load(MANIFEST.format(target=windowed(tmp_path, target), head="nowhere"))
    pool["spec"]["draftPool"] = [{"name": "self", "method": "SparseSelf", "sparseSelf": {"windowTokens": 64}}]
    ran = unhurried(tmp_path, yaml.safe_dump(pool), 6)
    assert [(failure.reason, failure.drafter) for failure in ran.result.failures] == [("DrafterFailed", "self")]
    assert "attention is not plain" in ran.result.failures[0].message
    assert ran.result.target is not None, ran.output
    assert "verify 3" in ran.output


def test_stopped_job_writes_nothing_and_ends_its_engine(manifest, tmp_path):
    """SIGTERM (the Job gives way to a serving pod): nothing was concluded, so nothing is reported."""
    running = subprocess.Popen(command(tmp_path, manifest, "--target"), stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert "starting the engine" in running.stdout.readline()
    engine = psutil.Process(_child(running.pid))
    running.send_signal(signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 143
    running.stdout.close()
    assert not (tmp_path / "termination-log").exists()
    assert _has_ended(engine)


def _has_ended(process: psutil.Process) -> bool:
    """It ends also before its status was read, when it has no parent any more."""
    psutil.wait_procs([process], timeout=60)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _child(parent: int) -> int:
    """The engine process of the profiler `parent`."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for child in map(int, children.read_text().split()):
            if os.getpgid(child) == child:
                return child
        time.sleep(0.05)
    raise AssertionError("no engine process came up")
