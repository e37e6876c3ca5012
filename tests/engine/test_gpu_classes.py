"""The GPU worker and runners fit the vLLM that is installed. There is no GPU here: nothing of them is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def test_every_method_that_we_override_is_there() -> None:
    """Bug: a renamed method of vLLM's is not overridden any more, and nothing says so."""
    from outrider_runtime.vllm_plugin import cpu_v1, gpu, runner, scheduler
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
        cpu_v1.OutriderCPURunner: (CPUModelRunner, {"_update_states"}),
        cpu_v1.OutriderCPUWorker: (cpu_worker.CPUWorker, {"init_device"}),
        gpu.OutriderSecondRunner: (SecondRunner, {"load_model", "execute_model", "sample_tokens"}),
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


class ThreeRequests:
    num_reqs = 3


def second_runner(propose: Callable[..., Any]) -> Any:
    """vLLM's second runner around a speculator that proposes as told; nothing of a GPU in it."""
    import torch
    from outrider_runtime.vllm_plugin.gpu import OutriderSecondRunner

    runner: Any = OutriderSecondRunner.__new__(OutriderSecondRunner)
    runner.num_speculative_steps, runner.device = 2, torch.device("cpu")
    runner.speculator = SimpleNamespace(propose=propose)
    runner._watch_speculator("eagle", vocabulary_size=100)
    return runner


def test_the_second_runners_speculator_is_idle_without_an_order() -> None:
    """Promise: at K = 0 every row is padding and the draft's forward does not run."""
    import torch

    calls: list[object] = []

    def forward(batch: object, **_keywords: object) -> torch.Tensor:
        calls.append(batch)
        return torch.zeros(3, 2)

    runner = second_runner(forward)
    propose = runner.speculator.propose
    runner._draft_runs = False
    assert propose(ThreeRequests()).tolist() == [[-1, -1]] * 3
    assert not calls
    propose(ThreeRequests(), dummy_run=True)
    runner._draft_runs = True
    propose(ThreeRequests())
    assert len(calls) == 2
    assert runner._report.neural_ran


def test_a_speculator_that_raises_costs_its_proposals_and_is_reported() -> None:
    """Places for its tokens are scheduled already, and the embedding has no row for padding: real tokens fill them."""

    def forward(*_arguments: object, **_keywords: object) -> None:
        raise RuntimeError("out of workspace")

    runner = second_runner(forward)
    assert runner.speculator.propose(ThreeRequests()).tolist() == [[0, 0]] * 3
    assert "out of workspace" in runner._report.failures["eagle"]
    assert not runner._report.neural_ran


def test_a_speculators_stray_tokens_are_replaced_on_the_device_and_reported_with_the_next_step() -> None:
    """The host does not wait for the device: the verdict comes with a later step's report."""
    import torch
    from outrider_runtime.vllm_plugin.runner import step_report

    runner = second_runner(lambda *_arguments, **_keywords: torch.tensor([[5, 100], [2**30, 7], [-3, 99]]))
    assert runner.speculator.propose(ThreeRequests()).tolist() == [[5, 0], [0, 7], [0, 99]]
    assert not runner._report.failures
    assert "vocabulary of 100" in step_report(runner._strays, "eagle").failures["eagle"]
    assert not step_report(runner._strays, "eagle").failures, "said once"


def test_an_asynchronous_output_carries_the_report_of_its_step() -> None:
    """Bug: only synchronous steps carried one, so that a drafter that failed on a GPU was asked again for ever."""
    from outrider_runtime.vllm_plugin.async_steps import ReportedOutput
    from outrider_runtime.vllm_plugin.messages import StepReport, attached_report
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    class UnderWay(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> ModelRunnerOutput:
            return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})

    report = StepReport(failures={"eagle": "it raised"})
    output = ReportedOutput(UnderWay(), report)
    assert isinstance(output, AsyncModelRunnerOutput)
    assert attached_report(output.get_output()) is report
