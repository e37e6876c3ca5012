"""Every name of vLLM's insides that the plugin relies on is there, and each of our classes can be built on it.

A new release of vLLM is tried with this file first: what changed is found in one run, without an engine.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
GPU = "vllm.v1.worker.gpu"
OVERRIDDEN = {
    "scheduler.SpeculationControl": (
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
        "schedule update_from_output add_request shutdown _update_after_schedule _free_request _preempt_request",
    ),
    "runner.PoolRunner": (
        f"{GPU}.model_runner.GPUModelRunner", "execute_model sample sample_tokens take_draft_token_ids"
    ),
    "runner.CPUPoolRunner": ("vllm.v1.worker.cpu.model_runner.CPUModelRunner", ""),
    "runner.ReportedOutput": ("vllm.v1.outputs.AsyncModelRunnerOutput", "get_output"),
    "speculator.PoolSpeculator": (
        f"{GPU}.spec_decode.speculator.DraftModelSpeculator",
        "load_draft_model load_model set_eplb_state set_attn init_cudagraph_manager capture observe_verification "
        "prepare_watermarking propose",
    ),
    "draft_model.DraftModel": (
        f"{GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator", "load_draft_model propose"
    ),
    "eagle_head.EagleHead": (f"{GPU}.spec_decode.eagle.speculator.EagleSpeculator", "load_draft_model"),
    "prompt_lookup.PromptLookup": (f"{GPU}.spec_decode.ngram.speculator.NgramGPUSpeculator", "propose"),
    "cpu_worker.OutriderCPUWorker": (
        "vllm.v1.worker.cpu_worker.CPUWorker", "init_device compile_or_warm_up_model execute_model"
    ),
    "cpu_executor.OutriderCPUExecutor": (
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor", "take_draft_token_ids"
    ),
    "gpu_worker.OutriderGPUWorker": ("vllm.v1.worker.gpu_worker.Worker", "init_device _make_model_runner"),
}  # fmt: skip
"""Class of ours -> vLLM's that it stands on, and the methods that it overrides."""
CALLED = {
    f"{GPU}.model_runner.init_speculator": "vllm_config device req_states",
    f"{GPU}.spec_decode.eagle.speculator.EagleSpeculator": "vllm_config device",
    f"{GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator._run_model": (
        "self input_ids positions attn_metadata slot_mappings num_tokens_across_dp"
    ),
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator._build_attn_metadata": (
        "self num_reqs batch_desc query_start_loc_np seq_lens_cpu_upper_bound step causal dcp_local_seq_lens "
        "slot_mappings"
    ),
    f"{GPU}.block_table.BlockTables.gather_block_tables": "self idx_mapping num_reqs_padded out out_ptrs",
    f"{GPU}.block_table.BlockTables.compute_slot_mappings": (
        "self idx_mapping query_start_loc positions num_tokens_padded out"
    ),
    f"{GPU}.attn_utils.build_slot_mappings_by_layer": "slot_mappings kv_cache_config",
    f"{GPU}.spec_decode.eagle.utils.get_model": "vllm_config model_config prefix load_config",
    f"{GPU}.spec_decode.standalone_ar.speculator.get_model": "vllm_config model_config prefix load_config",
    f"{GPU}.spec_decode.eagle.eagle3_utils.get_eagle3_aux_layers_from_config": "spec_config",
    "vllm.sampling_params.SamplingParams._validate_spec_decode": "self speculative_config",
    "vllm.v1.core.block_pool.BlockPool.get_new_blocks": "self num_blocks",
    "vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids": "self draft_token_ids",
    "vllm.v1.outputs.DraftTokenIds": "req_ids draft_token_ids",
}
"""What we call, or stand in for -> its parameters."""


def found(path: str) -> Any:
    names = path.split(".")
    for end in range(len(names), 0, -1):
        try:
            thing = importlib.import_module(".".join(names[:end]))
        except ModuleNotFoundError:
            continue
        for name in names[end:]:
            thing = getattr(thing, name)
        return thing
    raise AssertionError(f"there is no {path}")


@pytest.mark.parametrize("ours", OVERRIDDEN)
def test_every_method_that_we_override_is_there(ours: str) -> None:
    """Bug: a renamed method of vLLM's is not overridden any more, and nothing says so."""
    found("outrider_runtime.vllm_plugin.cpu_worker")  # binds vLLM's kernels before others do
    base, overridden = OVERRIDDEN[ours]
    mine, theirs = found(f"outrider_runtime.vllm_plugin.{ours}"), found(base)
    assert issubclass(mine, theirs) or issubclass(theirs, mine.__mro__[1])
    assert not getattr(mine, "__abstractmethods__", None), "it cannot be built"
    for name in overridden.split():
        assert name in vars(mine), f"{mine.__name__} does not override {name}"
        assert callable(getattr(theirs, name, None)), f"vLLM's {theirs.__name__} has no {name}"


@pytest.mark.parametrize("theirs", CALLED)
def test_what_we_call_takes_what_we_give(theirs: str) -> None:
    found("outrider_runtime.vllm_plugin.cpu_worker")
    assert list(inspect.signature(found(theirs)).parameters) == CALLED[theirs].split()


def test_a_proposal_is_asked_for_with_the_batch_first() -> None:
    """The members of a pool get what follows as it comes; they must agree on it."""
    wanted = [
        list(inspect.signature(found(f"{GPU}.spec_decode.{name}").propose).parameters)
        for name in (
            "target_dependent_ar.speculator.TargetDependentARSpeculator",
            "standalone_ar.speculator.StandaloneARSpeculator", "ngram.speculator.NgramGPUSpeculator",
        )
    ]  # fmt: skip
    assert wanted[0] == wanted[1] == wanted[2]
    assert wanted[0][1] == "input_batch"
    assert {"dummy_run", "num_speculative_tokens"} <= {*wanted[0]}
