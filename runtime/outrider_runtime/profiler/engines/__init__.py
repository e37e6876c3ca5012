"""The engines that the profiler can measure, each adapted to the interface of `measurable`.

A new engine is a module here and a line in the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider_crds.spec import Backend

from outrider_runtime.profiler.engines import torch_engine, vllm_engine
from outrider_runtime.profiler.engines.measurable import Measurable

ENGINES: Mapping[Backend, Measurable] = {
    Backend.VLLM: vllm_engine.MEASURABLE,
    Backend.TORCH: torch_engine.MEASURABLE,
}
