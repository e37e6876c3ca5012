"""Number format in which engines compute on CPUs."""

from __future__ import annotations

import pytest
from outrider_crds.runtime_config import BootConfig
from outrider_crds.spec import Accelerator, Backend, Dtype, Engine
from outrider_runtime import dtype

from tests.engine import engines


def boot(named: Dtype, product: str = "cpu", backend: Backend = Backend.VLLM) -> BootConfig:
    changed = {"engine": Engine(dtype=named, backend=backend), "accelerator": Accelerator(products=[product])}
    return engines.boot_config([]).model_copy(update=changed)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize(("has_instructions", "served"), [(False, Dtype.FLOAT32), (True, Dtype.AUTO)])
def test_cpu_without_bfloat16_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, has_instructions: bool, served: Dtype, backend: Backend
) -> None:
    """Bug: a prompt took eight times as long, and so did profiling. A dtype that the manifest names is kept."""
    monkeypatch.setattr(dtype, "multiplies_bfloat16", lambda: has_instructions)
    assert dtype.engine_dtype(boot(Dtype.AUTO, backend=backend)) is served
    assert dtype.engine_dtype(boot(Dtype.BFLOAT16, backend=backend)) is Dtype.BFLOAT16


def test_gpu_computes_in_the_format_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype, "multiplies_bfloat16", lambda: False)
    assert dtype.engine_dtype(boot(Dtype.AUTO, "NVIDIA-H200")) is Dtype.AUTO
