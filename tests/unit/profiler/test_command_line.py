"""`outrider-profile` as the operator's Job and a person call it, up to where an engine would start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from outrider_crds.profile import ProfilingResult
from outrider_crds.runtime_config import BootConfig, boot_config
from outrider_runtime.profiler.main import main

from tests.unit.profiler.test_failures import service

MANIFEST = """
apiVersion: outrider.dev/v1alpha1
kind: SpeculativeService
metadata: {{name: s}}
spec:
  target: {{name: target, source: {{hostPath: {{path: {models}/target}}}}}}
  draftPool:
  - name: eagle
    method: Eagle
    eagle: {{model: {{name: head, source: {{hostPath: {{path: {models}/head}}}}}}}}
  accelerator: {{products: [cpu]}}
"""


@pytest.fixture(autouse=True)
def _same_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def boot(tmp_path: Path, **where: str) -> BootConfig:
    spec = service(tmp_path, **where)
    return boot_config(spec, service="s", namespace="n", revision="r", image="i", max_draft_tokens=4)


def call(tmp_path: Path, *arguments: str) -> tuple[int, ProfilingResult]:
    result = tmp_path / "termination-log"
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--result", str(result)])
    assert isinstance(ended.value.code, int)
    return ended.value.code, ProfilingResult.model_validate_json(result.read_bytes())


def test_missing_model_exits_1_with_a_result(tmp_path):
    """The Job's own result, not its exit code, tells the operator what to write into the condition."""
    config = boot(tmp_path, target="/nowhere/at/all").model_dump_json(by_alias=True)
    code, result = call(tmp_path, "--config-json", config, "--product", "cpu", "--target", "--drafter", "lookup")
    assert code == 1
    assert [(f.reason, f.drafter) for f in result.failures] == [("ModelNotFound", "")]


def test_draft_with_another_vocabulary_exits_1(tmp_path):
    """Nothing could be measured for a manifest on a laptop; the failure has the drafter's name."""
    service(tmp_path, vocab_size=5)
    manifest = tmp_path / "service.yaml"
    manifest.write_text(MANIFEST.format(models=tmp_path))
    code, result = call(tmp_path, "-f", str(manifest), "--drafter", "eagle")
    assert code == 1
    assert [(f.reason, f.drafter) for f in result.failures] == [("VocabularyMismatch", "eagle")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "turbo"], "the pool has lookup, eagle"),
        (["--product", "NVIDIA-H200"], "has keys for cpu"),
        (["--time-budget", "soon"], "is not a duration"),
    ],
)
def test_wrong_argument_is_refused_with_the_right_ones(tmp_path, capsys, arguments, said):
    code, result = call(tmp_path, "--config-json", boot(tmp_path).model_dump_json(by_alias=True), *arguments)
    assert code == 2
    assert said in capsys.readouterr().err
    assert said in result.failures[0].message


def test_invalid_config_is_refused_by_field(tmp_path, capsys):
    code, _ = call(tmp_path, "--config-json", '{"service": "s"}')
    assert code == 2
    assert "namespace" in capsys.readouterr().err


def test_missing_manifest_is_named(tmp_path, capsys):
    code, _ = call(tmp_path, "-f", str(tmp_path / "none.yaml"))
    assert code == 2
    assert "none.yaml" in capsys.readouterr().err
