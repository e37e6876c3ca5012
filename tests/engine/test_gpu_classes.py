"""The GPU worker and runners fit the vLLM that is installed. There is no GPU here: nothing of them is run."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def test_every_method_that_we_override_is_there() -> None:
    """Bug: a renamed method of vLLM's is not overridden any more, and nothing says so."""
    from outrider_runtime.vllm_plugin import cpu, gpu, runner, scheduler
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.worker import cpu_worker, gpu_worker
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    ours: dict[type, tuple[type, set[str]]] = {
        scheduler.SpeculationControl: (
            AsyncScheduler,
            {"schedule", "update_from_output", "add_request", "shutdown", "_update_after_schedule", "_free_request"}
            | {"_preempt_request", "update_draft_token_ids"},
        ),
        runner.DraftOrders: (
            GPUModelRunner,
            {"load_model", "execute_model", "sample_tokens", "propose_draft_token_ids", "_sample"}
            | {"_input_fits_in_drafter"},
        ),
        cpu.OutriderCPURunner: (CPUModelRunner, {"_update_states"}),
        cpu.OutriderCPUWorker: (cpu_worker.CPUWorker, {"init_device"}),
        gpu.OutriderSecondRunner: (SecondRunner, {"load_model", "execute_model"}),
        gpu.OutriderGPUWorker: (gpu_worker.Worker, {"init_device", "_make_model_runner"}),
    }
    for mine, (theirs, overridden) in ours.items():
        assert issubclass(theirs, mine.__mro__[1]) or issubclass(mine, theirs)
        for name in overridden:
            assert name in vars(mine), f"{mine.__name__} no longer overrides {name}"
            assert callable(getattr(theirs, name, None)), f"vLLM's {theirs.__name__} has no {name}"


def test_the_arguments_of_a_proposal_are_in_the_order_that_we_rely_on() -> None:
    """`_propose_neural` finds the attention metadata second from last."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    names = list(inspect.signature(GPUModelRunner.propose_draft_token_ids).parameters)
    assert names[1:3] == ["scheduler_output", "sampled_token_ids"]
    assert names[-2] == "common_attn_metadata"


def test_the_second_runners_speculator_is_idle_without_an_order() -> None:
    """Promise: at K = 0 every row is padding and the draft's forward does not run."""
    import torch
    from outrider_runtime.vllm_plugin.gpu import OutriderSecondRunner

    class Batch:
        num_reqs = 3

    runner: Any = OutriderSecondRunner.__new__(OutriderSecondRunner)
    runner.num_speculative_steps, runner.device = 2, torch.device("cpu")
    calls: list[object] = []

    def forward(batch: object, **_keywords: object) -> torch.Tensor:
        calls.append(batch)
        return torch.zeros(3, 2)

    propose = runner._when_ordered(forward)
    runner._draft_runs = False
    assert propose(Batch()).tolist() == [[-1, -1]] * 3
    assert not calls
    propose(Batch(), dummy_run=True)
    runner._draft_runs = True
    propose(Batch())
    assert len(calls) == 2
