"""Worker on a CPU, where every step is synchronous and one call.

The worker is a process of its own, for OpenMP's sake. A call to it costs up to two milliseconds on busy cores, and vLLM
makes three calls in a step that may propose.
"""

from __future__ import annotations

from typing import Any

import outrider_cpu

outrider_cpu.install()  # vLLM's modules bind their kernels when they are imported

from vllm.distributed.parallel_state import get_pp_group  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.worker import cpu_worker  # noqa: E402

from outrider_runtime.vllm_plugin.patches import CPU_RUNNER, put  # noqa: E402
from outrider_runtime.vllm_plugin.runner import CPUPoolRunner  # noqa: E402
from outrider_runtime.vllm_plugin.worker import PoolWorker  # noqa: E402


class OutriderCPUWorker(PoolWorker, cpu_worker.CPUWorker):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's worker builds its runner inline, so the class is replaced in the runner's module before it does."""

    def init_device(self) -> None:
        put(CPU_RUNNER, CPUPoolRunner)
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        outrider_cpu.compile_stand_ins(self.model_runner, super().execute_model, self.sample_tokens)
        self.vllm_config.kernel_config.enable_jit_warmup = False  # newer versions would repeat it for the largest batch
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the whole step in one call, unless the scheduler makes a grammar's mask while the target runs."""
        output = super().execute_model(scheduler_output)
        masked = scheduler_output.has_structured_output_requests
        if output is None and get_pp_group().is_last_rank and not masked and not self.scheduler_config.async_scheduling:
            return self.sample_tokens(None)
        return output
