"""In which numbers an engine computes."""

from __future__ import annotations

from outrider_crds.runtime_config import BootConfig
from outrider_crds.spec import Dtype

from outrider_runtime.processor import multiplies_bfloat16


def engine_dtype(boot: BootConfig) -> Dtype:
    """What the manifest names, or float32 on CPUs that are slow at less. AUTO: as the weights are stored."""
    if boot.engine.dtype is Dtype.AUTO and boot.accelerator.on_cpu and not multiplies_bfloat16():
        return Dtype.FLOAT32
    return boot.engine.dtype
