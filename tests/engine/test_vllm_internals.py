"""Every name of vLLM's insides that the plugin relies on is there, and each of our classes can be built on it.

A new release of vLLM is tried with this file first: what changed is found in one run, without an engine.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from outrider_runtime.torch_engine.openai_requests import NEUTRAL, ChatRequest, CompletionRequest, GenerationRequest
from outrider_runtime.vllm_plugin.versions import MOVED

from tests.engine.vllm_symbols import SYMBOLS

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
GPU = "vllm.v1.worker.gpu"
VERSIONS = "outrider_runtime.vllm_plugin.versions"
OVERRIDDEN = {
    "bounded_input.BoundedInput": ("vllm.v1.engine.input_processor.InputProcessor", "process_inputs"),
    "scheduler.SpeculationControl": (
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
        "schedule update_from_output add_request shutdown _update_after_schedule _free_request _preempt_request "
        "_free_request_blocks",
    ),
    "runner.PoolRunner": (
        f"{GPU}.model_runner.GPUModelRunner",
        "load_model initialize_kv_cache capture_model prepare_inputs execute_model sample sample_tokens "
        "take_draft_token_ids",
    ),
    "adapters.RunnerWithAdapters": (
        f"{GPU}.model_runner.GPUModelRunner", "load_model load_lora_model prepare_inputs sample _set_active_loras"
    ),
    "adapters.StateOfAdapters": (f"{GPU}.lora_utils.LoraState", "get_activate_loras"),
    "runner.CPUPoolRunner": ("vllm.v1.worker.cpu.model_runner.CPUModelRunner", ""),
    "runner.ReportedOutput": ("vllm.v1.outputs.AsyncModelRunnerOutput", "get_output"),
    "speculator.PoolSpeculator": (
        f"{GPU}.spec_decode.speculator.DraftModelSpeculator",
        "load_draft_model load_model set_eplb_state set_attn init_cudagraph_manager capture observe_verification "
        "prepare_watermarking propose",
    ),
    "draft_model_member.DraftModelMember": (
        f"{GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator",
        "load_draft_model load_model set_attn _build_attn_metadata _multi_step_decode propose",
    ),
    "confident.Confident": (f"{GPU}.spec_decode.speculator.DraftModelSpeculator", "_maybe_predict_acceptance"),
    "device_ranking.DeviceRanking": (
        f"{GPU}.spec_decode.adaptive_verification.AdaptiveVerificationManager",
        "add_request batches_to_profile set_initial_cost_curves record_confidences get_num_tokens reallocate_drafts",
    ),
    "sparse_self_member.SparseSelfMember": (
        f"{GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator", "load_model set_attn propose"
    ),
    "eagle_head.EagleHead": (f"{GPU}.spec_decode.eagle.speculator.EagleSpeculator", "load_draft_model"),
    "eagle_head.FirstPass": (
        f"{GPU}.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator",
        "init_cudagraph_manager propose",
    ),
    "mtp_head.MTPHead": (f"{GPU}.spec_decode.mtp.speculator.MTPSpeculator", "load_draft_model"),
    "block_draft.DFlash2": (f"{GPU}.spec_decode.dflash2.speculator.DFlash2Speculator", "_generate_draft"),
    "eagle_head.FirstPassGraphs": (
        f"{GPU}.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorCudaGraphManager", "dispatch"
    ),
    "suffix_member.SuffixMember": (
        f"{GPU}.spec_decode.speculator.BaseSpeculator", "init_cudagraph_manager capture propose"
    ),
    "worker.PoolWorker": ("vllm.v1.worker.gpu_worker.Worker", "init_device load_model determine_available_memory"),
    "cpu_worker.OutriderCPUWorker": (
        "vllm.v1.worker.cpu_worker.CPUWorker", "init_device compile_or_warm_up_model execute_model"
    ),
    "cpu_executor.OutriderCPUExecutor": (
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor", "take_draft_token_ids"
    ),
    "gpu_worker.OutriderGPUWorker": ("vllm.v1.worker.gpu_worker.Worker", "_make_model_runner"),
}  # fmt: skip
"""Class of ours -> vLLM's that it stands on, and the methods that it overrides."""
CALLED = {
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": "vllm_config monitor_workers",
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor.start_worker_monitor": "self inline",
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor.shutdown": "self",
    "vllm.lora.worker_manager.WorkerLoRAManager._load_adapter": "self lora_request",
    "vllm.v1.engine.async_llm.AsyncLLM.add_lora": "self lora_request",
    "vllm.v1.engine.async_llm.AsyncLLM.remove_lora": "self lora_id",
    f"{GPU}.model_runner.init_speculator": "vllm_config device req_states",
    f"{GPU}.model_runner.set_eagle3_aux_hidden_state_layers": "model spec_config use_pp?",
    f"{GPU}.spec_decode.eagle.speculator.EagleSpeculator": "vllm_config device",
    f"{GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator._run_model": (
        "self input_ids positions attn_metadata slot_mappings num_tokens_across_dp"
    ),
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator._build_attn_metadata": (
        "self num_reqs batch_desc query_start_loc_np seq_lens_cpu_upper_bound step causal dcp_local_seq_lens "
        "slot_mappings"
    ),
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator._build_uniform_attn_metadata": (
        "self batch_desc num_reqs num_query_per_req seq_lens_cpu_upper_bound step causal dcp_local_seq_lens"
    ),
    f"{GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator._multi_step_decode": (
        "self input_batch num_rejected num_reqs skip_attn num_tokens_across_dp"
    ),
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator.sample_draft": (
        "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits spec_step_idx "
        "num_steps?"
    ),
    f"{GPU}.cudagraph_utils.CudaGraphManager": (
        "vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode ubatch_runner"
    ),
    f"{GPU}.cudagraph_utils.CudaGraphManager.capture": "self create_forward_fn progress_bar_desc",
    f"{GPU}.cudagraph_utils.CudaGraphManager.run_fullgraph": "self desc",
    f"{GPU}.cudagraph_utils.prepare_inputs_to_capture": (
        "num_reqs num_tokens model_state input_buffers block_tables attn_groups kv_cache_config full_cudagraph "
        "max_query_len pcp_manager"
    ),
    f"{GPU}.input_batch.InputBatch.make_dummy": "num_reqs num_tokens input_buffers max_query_len is_padding",
    f"{GPU}.block_table.BlockTables.get_dummy_block_tables": "self num_reqs",
    f"{GPU}.block_table.BlockTables.get_dummy_slot_mappings": "self num_tokens",
    f"{GPU}.block_table.BlockTables.gather_block_tables": (
        "self idx_mapping num_reqs_padded out out_ptrs num_computed_tokens?"
    ),
    f"{GPU}.block_table.BlockTables.compute_slot_mappings": (
        "self idx_mapping query_start_loc positions num_tokens_padded out"
    ),
    f"{GPU}.sample.prompt_logprob.PromptLogprobsWorker.compute_prompt_logprobs": (
        "self logits_fn hidden_states input_batch all_token_ids num_computed_tokens prompt_lens"
    ),
    f"{GPU}.sample.prompt_logprob.PromptLogprobsWorker.compute_prompt_token_id_logprobs": (
        "self logits_fn hidden_states input_batch prompt_lens"
    ),
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention._spec_forward": (
        "layer attn_metadata_i mixed_qkv_spec b_spec a_spec conv_buf ssm_state width state_len"
    ),
    "vllm.lora.ops.torch_ops.lora_ops.bgmv_shrink": ("inputs lora_b_weights output_tensor lora_indices_tensor scaling"),
    "vllm.lora.ops.torch_ops.lora_ops.bgmv_expand": (
        "inputs lora_b_weights output_tensor lora_indices_tensor add_inputs"
    ),
    "vllm.lora.ops.torch_ops.lora_ops.bgmv_expand_slice": (
        "inputs lora_b_weights output_tensor lora_indices_tensor slice_offset slice_size add_inputs"
    ),
    f"{GPU}.cudagraph_utils.ModelCudaGraphManager": (
        "vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode ubatch_runner"
    ),
    f"{GPU}.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorCudaGraphManager": (
        "vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode ubatch_runner"
    ),
    f"{GPU}.cudagraph_utils.CudaGraphManager.dispatch": (
        "self num_reqs num_tokens uniform_token_count num_active_loras max_query_len num_ubatches"
    ),
    f"{GPU}.attn_utils.get_varlen_cudagraph_unsupported_backend": (
        "attn_groups vllm_config max_query_len checked_layer_names"
    ),
    f"{GPU}.attn_utils.get_query_lens_mismatch_unsupported_backend": "attn_groups checked_layer_names",
    f"{GPU}.spec_decode.rejection_sampler.get_max_chunk_logits": "vocab_size",
    f"{GPU}.spec_decode.adaptive_verification.AdaptiveVerificationManager.compact_batch": (
        "self num_draft_tokens_per_req num_scheduled_tokens cu_num_logits_np"
    ),
    f"{GPU}.model_states.interface.ModelState.get_additional_cg_support": "self",
    "vllm.utils.torch_utils.async_tensor_h2d": "data device dtype out",
    f"{GPU}.attn_utils.init_attn_backend": "kv_cache_config vllm_config device active_layer_names draft_layer_names",
    f"{GPU}.attn_utils.build_slot_mappings_by_layer": "slot_mappings kv_cache_config",
    f"{GPU}.spec_decode.eagle.utils.get_model": "vllm_config model_config prefix load_config",
    "vllm.model_executor.model_loader.base_loader.initialize_model": ("vllm_config prefix model_class model_config"),
    "vllm.model_executor.model_loader.base_loader.process_weights_after_loading": "model model_config target_device",
    f"{GPU}.spec_decode.standalone_ar.speculator.get_model": "vllm_config model_config prefix load_config",
    f"{GPU}.spec_decode.eagle.eagle3_utils.get_eagle3_aux_layers_from_config": "spec_config",
    "vllm.model_executor.models.interfaces.SupportsEagle3.set_aux_hidden_state_layers": "self layers",
    "vllm.model_executor.models.interfaces.SupportsEagle3.get_eagle3_default_aux_hidden_state_layers": "self",
    "vllm.sampling_params.SamplingParams._validate_spec_decode": "self speculative_config",
    "vllm.v1.engine.core.EngineCoreProc.run_engine_core": "args dp_rank local_dp_rank kwargs",
    f"{VERSIONS}.check_enough_kv_cache_memory": "vllm_config kv_cache_spec available_memory",
    "vllm.v1.kv_cache_interface.KVCacheSpec.max_memory_usage_bytes": "self vllm_config",
    "vllm.v1.core.block_pool.BlockPool.get_new_blocks": "self num_blocks",
    "vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids": "self draft_token_ids",
    "vllm.v1.outputs.DraftTokenIds": "req_ids draft_token_ids",
    f"{GPU}.cudagraph_utils.build_dynamic_sd_schedule_lookup": (
        "num_speculative_tokens_per_batch_size vllm_max_batch_size vllm_num_speculative_tokens"
    ),
    f"{GPU}.spec_decode.target_dependent_ar.cudagraph_utils.build_dynamic_sd_schedule_lookup": (
        "num_speculative_tokens_per_batch_size vllm_max_batch_size vllm_num_speculative_tokens"
    ),
    f"{GPU}.warmup.warmup_kernels": "model_runner worker_execute_model worker_sample_tokens",
    "vllm.compilation.backends.set_model_tag": "tag is_encoder",
    "vllm.model_executor.models.interfaces.supports_eagle3": "model",
    "vllm.v1.core.sched.request_queue.FCFSRequestQueue.peek_request": "self",
    "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase.get_kv_cache_spec": "self vllm_config",
    f"{GPU}.model_runner.GPUModelRunner.get_kv_cache_spec": "self",
    "vllm.platforms.interface.Platform.register_triton_kernel_overrides": "",
    "vllm.entrypoints.launchers.api_server.app_state.init_app_state": "engine_client state args supported_tasks",
    "vllm.entrypoints.launchers.api_server.entry.build_async_engine_client": "args usage_context client_config",
    "vllm.entrypoints.launchers.app.build_app": "args supported_tasks model_config",
    f"{VERSIONS}.make_arg_parser": "parser",
    f"{VERSIONS}.validate_parsed_serve_args": "args",
    "vllm.entrypoints.launchers.launcher.NoSignalServer": "config peer_loads",
    "vllm.entrypoints.launchers.utils.server_utils.get_uvicorn_log_config": "args",
    f"{VERSIONS}.cli_env_setup": "",
    "vllm.logger.configure_logging_from_args": "args",
    "vllm.lora.request.LoRARequest": "lora_name lora_int_id lora_path base_model_name load_inplace is_3d_lora_weight",
    "vllm.lora.utils.is_base_embedding_weights": "name",
    "vllm.config.get_layers_from_vllm_config": "vllm_config layer_type layer_names",
    f"{GPU}.spec_decode.dflash.cudagraph.DFlashCudaGraphManager": (
        "vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode ubatch_runner"
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheManager.evict_blocks": "self block_ids",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids": "self request_id",
    f"{GPU}.model_runner.GPUModelRunner._init_kv_zero_meta": "self",
}
"""What we call, or stand in for -> its parameters; `?`: one that only some versions of vLLM have."""

KEYWORDS = {
    f"{GPU}.attn_utils.build_attn_metadata": (
        "attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu max_query_len seq_lens max_seq_len "
        "block_tables slot_mappings kv_cache_config seq_lens_cpu_upper_bound positions is_prefilling"
    ),
}
"""What we call by keywords, among others that it takes."""

ATTRIBUTES = {
    "vllm.v1.engine.async_llm.AsyncLLM": "input_processor renderer vllm_config",
    "vllm.sampling_params.SamplingParams": (
        "logit_bias allowed_token_ids bad_words_token_ids min_tokens all_stop_token_ids"
    ),
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "vllm_config running waiting requests kv_cache_manager block_size max_model_len max_num_running_reqs "
        "max_num_scheduled_tokens max_num_active_reqs num_waiting_for_streaming_input grammar_compile_error_reqs"
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "block_pool coordinator",
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": "single_type_managers",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": "req_to_blocks",
    "vllm.v1.core.block_pool.BlockPool": "get_num_free_blocks blocks null_block",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "block_id ref_cnt",
    "vllm.v1.request.Request": (
        "request_id status arrival_time sampling_params max_tokens num_tokens num_prompt_tokens num_computed_tokens "
        "num_output_tokens num_output_placeholders spec_token_ids is_prefill_chunk output_token_ids mm_features "
        "prompt_embeds"
    ),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        "num_scheduled_tokens scheduled_spec_decode_tokens num_spec_tokens_to_schedule num_invalid_spec_tokens "
        "has_structured_output_requests new_block_ids_to_zero total_num_scheduled_tokens"
    ),
    "vllm.v1.outputs.ModelRunnerOutput": "req_id_to_index sampled_token_ids",
    f"{GPU}.model_runner.GPUModelRunner": (
        "model speculator req_states draft_tokens_handler cudagraph_manager use_aux_hidden_state_outputs lora_config "
        "prompt_logprobs_worker attn_groups decode_query_len model_state scheduler_config adaptive_verification "
        "rejection_sampler input_buffers vocab_size aux_output_connector kv_block_zeroer"
    ),
    f"{GPU}.lora_utils.LoraState": "lora_requests",
    "vllm.lora.model_manager.LoRAModelManager": "modules packed_modules lora_config model",
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager": "_adapter_manager",
    "vllm.lora.lora_model.LoRAModel": "loras",
    "vllm.lora.lora_weights.LoRALayerWeights": "lora_a lora_b rank scaling",
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding": "shard_indices weight",
    "vllm.model_executor.layers.linear.QKVParallelLinear": (
        "input_size output_size total_num_heads total_num_kv_heads head_size v_head_size"
    ),
    "vllm.entrypoints.openai.models.serving.OpenAIServingModels": "lora_requests lora_id_counter",
    "vllm.v1.engine.output_processor.OutputProcessor": "request_states",
    "vllm.v1.engine.output_processor.RequestState": "lora_request",
    f"{GPU}.states.RequestState": (
        "req_id_to_index draft_tokens all_token_ids total_len max_num_reqs num_speculative_steps"
    ),
    f"{GPU}.spec_decode.adaptive_verification.AdaptiveVerificationManager": (
        "req_states num_speculative_steps num_bonus_tokens query_start_loc _batch_budget"
    ),
    f"{GPU}.spec_decode.rejection_sampler.RejectionSampler": "enable_adaptive_verification",
    f"{GPU}.model_states.interface.ModelState": "num_new_sampled_tokens_per_step",
    f"{GPU}.input_batch.InputBatch": (
        "req_ids num_reqs idx_mapping idx_mapping_np query_start_loc positions num_tokens_after_padding "
        "num_draft_tokens_per_req num_reqs_after_padding num_scheduled_tokens has_prefill max_query_len "
        "seq_lens seq_lens_cpu_upper_bound logits_indices cu_num_logits"
    ),
    f"{GPU}.cudagraph_utils.CudaGraphManager": "cudagraph_mode varlen_decode max_num_reqs _capture_descs _candidates",
    f"{GPU}.cudagraph_utils.BatchExecutionDescriptor": "num_tokens num_active_loras uniform_token_count max_query_len",
    f"{GPU}.spec_decode.utils.DraftTokensHandler": "req_ids",
    f"{GPU}.spec_decode.speculator.DraftModelSpeculator": (
        "vllm_config device model input_buffers block_tables kv_cache_config attn_groups draft_attn_layer_names "
        "num_speculative_steps num_extra_query_per_req pcp_manager max_num_reqs draft_token_confidence_probs "
        "idx_mapping temperature seeds draft_tokens draft_logits attn_cg_support model_state"
    ),
    f"{GPU}.spec_decode.dflash2.speculator.DFlash2Speculator": (
        "candidate_sampler sample_idx_mapping sample_col num_speculative_steps"
    ),
    f"{GPU}.spec_decode.dflash2.speculator.CandidateSampler": "scores",
    f"{GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator": (
        "expanded_slot_mappings arange_gpu dcp_size draft_is_prefilling max_model_len max_num_reqs speculative_config "
        "current_draft_step expanded_positions last_token_indices"
    ),
    f"{GPU}.block_table.BlockTables": "block_sizes block_tables input_block_tables slot_mappings",
    "vllm.config.model.ModelConfig": (
        "original_max_model_len max_model_len uses_mrope get_hidden_size get_vocab_size use_mla return_sampling_mask"
    ),
    "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata": (
        "num_spec_decodes spec_state_indices_tensor spec_query_start_loc num_accepted_tokens"
    ),
    "vllm.config.parallel.ParallelConfig": "pipeline_parallel_size enable_batch_sharded_sampling",
    "vllm.model_executor.models.llama_eagle3.LlamaModel": "fc",
    "vllm.model_executor.models.qwen3_eagle3.Qwen3Eagle3Model": "fc",
    "vllm.model_executor.models.deepseek_eagle3.DeepseekV2Eagle3Model": "fc",
    "vllm.model_executor.layers.linear.ReplicatedLinear": "input_size",
    "vllm.config.compilation.CompilationConfig": "static_forward_context max_cudagraph_capture_size",
    "vllm.config.compilation.CUDAGraphMode": "separate_routine decode_mode",
    "vllm.config.kernel.KernelConfig": "enable_jit_warmup",
    f"{GPU}.spec_decode.eagle.speculator.EagleSpeculator": "prefill_cudagraph_manager",
}  # fmt: skip
"""Class of vLLM's -> what we read or set of its objects."""


RUNTIME = Path(__file__).parents[2] / "runtime"


def imported_symbols() -> set[tuple[str, str]]:
    """(module, name) of every import from vLLM in the runtime's source."""
    trees = (ast.parse(file.read_text()) for file in RUNTIME.rglob("*.py"))
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    return {(module, name) for module, name in named if module.split(".")[0] == "vllm"}


def resolved(path: str) -> Any:
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


def test_each_import_from_vllm_is_listed() -> None:
    """Bug: 38 of 95 symbols were in no list, so that only a started engine showed their change."""
    assert {(module, name) for module, names in SYMBOLS.items() for name in names.split()} == imported_symbols()
    assert {f"{VERSIONS}.{name}" for name in MOVED} <= CALLED.keys()


@pytest.mark.parametrize("module", SYMBOLS)
def test_each_import_from_vllm_is_there(module: str) -> None:
    resolved("outrider_runtime.vllm_plugin.cpu_worker")
    for name in SYMBOLS[module].split():
        resolved(f"{module}.{name}")


@pytest.mark.parametrize("ours", OVERRIDDEN)
def test_every_method_that_we_override_is_there(ours: str) -> None:
    """Bug: a renamed method of vLLM's is not overridden any more, and nothing says so."""
    resolved("outrider_runtime.vllm_plugin.cpu_worker")  # binds vLLM's kernels before others do
    base, overridden = OVERRIDDEN[ours]
    mine, theirs = resolved(f"outrider_runtime.vllm_plugin.{ours}"), resolved(base)
    assert issubclass(mine, theirs) or issubclass(theirs, mine.__mro__[1])
    assert not getattr(mine, "__abstractmethods__", None), "it cannot be built"
    for name in overridden.split():
        assert name in vars(mine), f"{mine.__name__} does not override {name}"
        assert callable(getattr(theirs, name, None)), f"vLLM's {theirs.__name__} has no {name}"


@pytest.mark.parametrize("theirs", CALLED)
def test_what_we_call_takes_what_we_give(theirs: str) -> None:
    resolved("outrider_runtime.vllm_plugin.cpu_worker")
    takes = inspect.signature(resolved(theirs)).parameters
    listed = {name.removesuffix("?"): name.endswith("?") for name in CALLED[theirs].split()}
    assert list(takes) == [name for name, is_new in listed.items() if name in takes or not is_new]


@pytest.mark.parametrize("theirs", KEYWORDS)
def test_vllm_functions_take_our_keywords_and_need_no_others(theirs: str) -> None:
    resolved("outrider_runtime.vllm_plugin.cpu_worker")
    takes, keywords = inspect.signature(resolved(theirs)).parameters, set(KEYWORDS[theirs].split())
    assert keywords <= takes.keys()
    assert {name for name, parameter in takes.items() if parameter.default is inspect.Parameter.empty} <= keywords


@pytest.mark.parametrize("theirs", ATTRIBUTES)
def test_vllm_objects_have_the_attributes_we_read(theirs: str) -> None:
    """Most is set while an object is made, so that only the source tells."""
    resolved("outrider_runtime.vllm_plugin.cpu_worker")
    classes = [base_class for base_class in resolved(theirs).__mro__ if base_class.__module__.startswith("vllm.")]
    source = "".join(inspect.getsource(base_class) for base_class in classes)
    for name in ATTRIBUTES[theirs].split():
        there = rf"self\.{name}\b[^=(\n]*=(?!=)|^\s+self\.{name},|^    {name}: |def {name}\("
        assert re.search(there, source, re.MULTILINE), f"vLLM's {theirs.rpartition('.')[2]} has no {name}"


def test_propose_takes_the_batch_first() -> None:
    """The members of a pool get what follows as it comes; they must agree on it."""
    expected = [
        list(inspect.signature(resolved(f"{GPU}.spec_decode.{name}").propose).parameters)
        for name in (
            "target_dependent_ar.speculator.TargetDependentARSpeculator",
            "standalone_ar.speculator.StandaloneARSpeculator", "speculator.BaseSpeculator",
        )
    ]  # fmt: skip
    assert expected[0] == expected[1] == expected[2]
    assert expected[0][1] == "input_batch"
    assert {"dummy_run", "num_speculative_tokens"} <= {*expected[0]}


@pytest.mark.parametrize(
    "ours",
    [
        "sparse_self_member.SparseSelfMember",
        "draft_model_member.DraftModelMember",
        "suffix_member.SuffixMember",
        "eagle_head.EagleHead",
    ],
)
def test_propose_may_be_called_by_keywords(ours: str) -> None:
    """Bug: while it measures memory on a GPU vLLM names what it gives, and the pool passes the names on."""
    resolved("outrider_runtime.vllm_plugin.cpu_worker")
    theirs = inspect.signature(resolved(f"{GPU}.spec_decode.speculator.BaseSpeculator").propose)
    by_place = ("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states")
    named = dict.fromkeys(theirs.parameters.keys() - {*by_place})
    inspect.signature(resolved(f"outrider_runtime.vllm_plugin.{ours}").propose).bind(*by_place, **named)


MEAN_NOTHING_TO_TORCH = {
    "user", "request_id", "session_id", "cache_salt",  # names
    "parallel_tool_calls", "include_reasoning", "length_penalty",  # of what is refused itself
    "stream_interval", "mm_payload", "return_mm_kwargs", "routed_experts_prompt_start",  # how vLLM works
}  # fmt: skip


@pytest.mark.parametrize(
    ("vllms", "ours"),
    [
        ("chat_completion.protocol.ChatCompletionRequest", ChatRequest),
        ("completion.protocol.CompletionRequest", CompletionRequest),
    ],
)
def test_torch_backend_serves_or_refuses_every_request_field(vllms: str, ours: type[GenerationRequest]) -> None:
    """None that changes the answer is read over."""
    module, name = vllms.rsplit(".", 1)
    known = getattr(importlib.import_module(f"vllm.entrypoints.openai.{module}"), name).model_fields
    assert known.keys() - ours.model_fields.keys() - NEUTRAL.keys() <= MEAN_NOTHING_TO_TORCH
