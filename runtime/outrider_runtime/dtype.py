"""Number format in which an engine computes."""

from __future__ import annotations

from outrider_crds.runtime_config import BootConfig
from outrider_crds.spec import Dtype

from outrider_runtime.processor import multiplies_bfloat16


def engine_dtype(boot: BootConfig) -> Dtype:
    """Return the manifest's dtype. AUTO, the format of the weights, becomes float32 on CPUs that lack bfloat16."""
    if boot.engine.dtype is Dtype.AUTO and boot.accelerator.on_cpu and not multiplies_bfloat16():
        return Dtype.FLOAT32
    return boot.engine.dtype
