"""Identity of the device of a measurement."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from outrider_runtime.identity import device_name


def test_device_name_makes_no_cuda_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the engine's core, which computes nothing, took memory of the GPU for a CUDA context of its own."""
    import torch

    def forbidden(*_arguments: object) -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", forbidden)
    platform = SimpleNamespace(is_cpu=lambda: False, get_device_name=lambda: "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    assert device_name() == "NVIDIA H200"
