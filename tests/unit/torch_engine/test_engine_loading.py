"""Loading an engine from a service's configuration: what is refused, what is left out, and that vLLM is not needed."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_crds.draft_pool import DrafterSpec
from outrider_crds.pod_template import EnvVar
from outrider_crds.runtime_config import BootConfig
from outrider_crds.spec import Accelerator, Backend, Dtype, Engine
from outrider_runtime import dtype
from outrider_runtime.paths import Paths
from outrider_runtime.torch_engine import engine_loading
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.engine_loading import Loaded, load
from outrider_runtime.torch_engine.hosting import Hosted, host
from outrider_runtime.torch_engine.options import Options
from outrider_runtime.torch_engine.torch_environment import DEFAULTS, engine_environment
from safetensors.torch import load_file, save_file

from tests.engine import engines
from tests.unit.torch_engine.models import VOCABULARY, write_head, write_model
from tests.unit.torch_engine.tokenizers import write_tokenizer


def boot(folder: Path, pool: list[DrafterSpec] | None = None, **engine: Any) -> BootConfig:
    return BootConfig(
        service="chat", namespace="default", revision="local", target=engines.model(folder), draft_pool=pool or [],
        accelerator=Accelerator(products=["cpu"]), max_draft_tokens=3,
        engine=Engine(**{"backend": Backend.TORCH, "dtype": Dtype.FLOAT32, **engine}),
    )  # fmt: skip


def started(config: BootConfig, tmp_path: Path) -> Loaded:
    places = {name: str(tmp_path) for name in ("hot_file", "profiles_dir", "podinfo_dir", "run_dir")}
    return load(config, engines.hot_config(), Paths(mounted=False, **places))


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"tensor_parallel_size": 2}, "spec.engine.tensorParallelSize"),
        ({"extra_args": ["--swap-space=4"]}, "spec.engine.extraArgs.*--swap-space"),
        ({"extra_args": ["--max-num-seqs=many"]}, "spec.engine.extraArgs.*--max-num-seqs"),
        ({"extra_args": ["--max-num-seqs=0"]}, "spec.engine.extraArgs.*--max-num-seqs.*above zero"),
        ({"extra_args": ["--max-num-batched-tokens=16"]}, "spec.engine.extraArgs.*--max-num-batched-tokens is 16.*32"),
        ({"max_model_len": 1000}, "spec.engine.maxModelLen is 1000.*256"),
        ({"max_model_len": 200, "extra_args": ["--kv-cache-memory-bytes=9999"]}, "spec.engine.maxModelLen.*room for"),
    ],
)
def test_unsupported_engine_option_is_refused_by_field(
    folder: Path, tmp_path: Path, engine: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        started(boot(folder, **engine), tmp_path)


@pytest.mark.parametrize(("has_instructions", "served"), [(False, torch.float32), (True, torch.bfloat16)])
def test_dtype_auto_follows_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_instructions: bool, served: torch.dtype
) -> None:
    write_model(tmp_path, model_type="llama", dtype="bfloat16")
    write_tokenizer(tmp_path)
    monkeypatch.setattr(dtype, "multiplies_bfloat16", lambda: has_instructions)
    assert started(boot(tmp_path, dtype=Dtype.AUTO), tmp_path).engine._models.target.dtype is served
    assert started(boot(tmp_path, dtype=Dtype.BFLOAT16), tmp_path).engine._models.target.dtype is torch.bfloat16


def test_model_that_cannot_run_is_refused_at_start(folder: Path, tmp_path: Path) -> None:
    """Rotations of half of each head do not show in the weights, and would make every step fail."""
    shutil.copytree(folder, tmp_path / "half")
    file = tmp_path / "half" / "config.json"
    rotation = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rotation}))
    with pytest.raises(UnsupportedModelError, match=rf"{file}: the model cannot be run"):
        started(boot(tmp_path / "half"), tmp_path)


def test_weights_of_nan_are_refused_at_start(folder: Path, tmp_path: Path) -> None:
    """Bug: a model of NaN became Ready, and answered with token 0 for ever."""
    shutil.copytree(folder, tmp_path / "nan")
    file = tmp_path / "nan" / "model.safetensors"
    save_file({name: tensor * math.nan for name, tensor in load_file(file).items()}, file)
    with pytest.raises(UnsupportedModelError, match=rf"{file.parent}: the tensor \S+ has NaN"):
        started(boot(tmp_path / "nan"), tmp_path)


def test_drafter_that_cannot_load_is_left_out_with_reason(folder: Path, tmp_path: Path) -> None:
    """A missing folder, truncated weights, a field of the wrong type, an unsupported method; the others draft."""
    write_head(tmp_path / "head")
    write_head(tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    shutil.copytree(folder, tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_attention_heads": "two"}))
    pool = [
        engines.draft_model(tmp_path / "nowhere"), engines.draft_model(tmp_path / "odd", "odd"),
        engines.eagle(tmp_path / "broken", "broken"), engines.sparse_self(64),
        engines.lookup(), engines.eagle(tmp_path / "head"),
    ]  # fmt: skip
    loaded = started(boot(folder, pool), tmp_path)
    state = loaded.reporter.state()
    assert {drafter.name: drafter.loaded for drafter in state.drafters} == {
        "draft": False, "odd": False, "broken": False, "self": False, "pld": True, "eagle": True,
    }  # fmt: skip
    reasons = {drafter.name: drafter.reason for drafter in state.drafters}
    assert "nowhere" in reasons["draft"]
    assert "cut off" in reasons["broken"]
    assert reasons["self"].startswith("Unsupported")
    assert state.engine_version.startswith("torch-")
    assert loaded.vocabulary == VOCABULARY
    memory = {drafter.name: drafter.memory for drafter in state.drafters if drafter.memory}
    assert set(memory) == {"eagle"}
    assert memory["eagle"].kv_bytes_per_token == 96  # one layer of the target's three
    assert memory["eagle"].concurrency_percent == 75.0


def test_kv_is_sized_after_drafters_are_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on a GPU the KV cache was allocated before the drafters' weights, which then did not fit."""
    write_head(tmp_path / "head")
    hosted_names: list[str] = []
    kv_bytes = engine_loading._kv_bytes

    def noted_host(*arguments: Any) -> Hosted:
        hosted = host(*arguments)
        hosted_names.extend(spec.name for spec in hosted.specs)
        return hosted

    def noted_kv_bytes(options: Options, device: torch.device) -> int:
        assert hosted_names == ["eagle"]
        return kv_bytes(options, device)

    monkeypatch.setattr(engine_loading, "host", noted_host)
    monkeypatch.setattr(engine_loading, "_kv_bytes", noted_kv_bytes)
    config = boot(folder, [engines.eagle(tmp_path / "head")], extra_args=["--kv-cache-memory-bytes=999999"])
    loaded = started(config, tmp_path)
    assert loaded.engine.free_kv_bytes == 999999


def test_environment_makes_waiting_threads_sleep(folder: Path) -> None:
    """Bug: threads spun on cores shared with other processes, a step took ten times as long, and a profile failed."""
    user_s = [EnvVar(name="OMP_WAIT_POLICY", value="ACTIVE"), EnvVar(name="LEVEL", value="1")]
    assert engine_environment(boot(folder), {}) == DEFAULTS
    others = {name: value for name, value in DEFAULTS.items() if name != "OMP_WAIT_POLICY"}
    assert engine_environment(boot(folder), {"OMP_WAIT_POLICY": "ACTIVE"}) == others
    assert engine_environment(boot(folder, env=user_s), {}) == {**others, "OMP_WAIT_POLICY": "ACTIVE", "LEVEL": "1"}


@pytest.mark.slow
def test_serving_does_not_import_vllm() -> None:
    """A laptop has `outrider[torch]` only."""
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import outrider_runtime.server.main, outrider_runtime.torch_engine.app\n"
        "import outrider_runtime.torch_engine.engine_loading\n"
        "import outrider_runtime.profiler.main, outrider_runtime.profiler.host"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
