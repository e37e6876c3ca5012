"""Everything of vLLM that has a stand-in on CPUs, in one table."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outrider_cpu import (
    block_drafts,
    block_tables,
    draft_models,
    grammar,
    heads,
    input_batch,
    linear_attention,
    logit_bias,
    logprobs,
    lora_ops,
    penalties,
    sampling,
    staged_writes,
    verification,
    zeroed_pages,
)
from outrider_cpu.interpreter import RUNNER
from outrider_cpu.stand_in import StandIn


@dataclass(frozen=True, slots=True)
class Replacement:
    module: str
    """Module's name, relative to `root`; with a class of it if the attribute is a method."""
    attribute: str
    """Name of a kernel, of a function that launches kernels, or of a function or constant elsewhere."""
    ours: Any
    root: str = RUNNER
    """Package of the module. The runner's modules import each other's functions by name, so all of them get ours."""

    @property
    def is_kernel(self) -> bool:
        return self.attribute.endswith("_kernel")


REPLACEMENTS = (
    Replacement("buffer_utils", "_apply_write_kernel", staged_writes.apply_write),
    Replacement("block_table", "_gather_block_tables_kernel", block_tables.gather_block_tables),
    Replacement("block_table", "_compute_slot_mappings_kernel", block_tables.compute_slot_mappings),
    Replacement("input_batch", "_prepare_prefill_inputs_kernel", input_batch.prepare_prefill_inputs),
    Replacement("input_batch", "_prepare_pos_seq_lens_kernel", input_batch.prepare_pos_seq_lens),
    Replacement(
        "input_batch", "_combine_sampled_and_draft_tokens_kernel", input_batch.combine_sampled_and_draft_tokens
    ),
    Replacement("input_batch", "_get_num_sampled_and_rejected_kernel", input_batch.get_num_sampled_and_rejected),
    Replacement("input_batch", "_post_update_kernel", input_batch.post_update),
    Replacement("input_batch", "_post_update_num_computed_tokens_kernel", input_batch.post_update_num_computed_tokens),
    Replacement("input_batch", "_expand_idx_mapping_kernel", input_batch.expand_idx_mapping),
    Replacement("sample.gumbel", "gumbel_sample", sampling.gumbel_sample),
    Replacement("sample.gumbel", "_temperature_kernel", sampling.apply_temperature),
    Replacement("sample.min_p", "_min_p_kernel", sampling.apply_min_p),
    Replacement("sample.logprob", "_topk_log_softmax_kernel", logprobs.topk_log_softmax),
    Replacement("sample.logprob", "_ranks_kernel", logprobs.ranks),
    Replacement("sample.logprob", "_fill_logprob_token_ids_kernel", logprobs.fill_logprob_token_ids),
    Replacement("sample.prompt_logprob", "_prompt_logprobs_token_ids_kernel", logprobs.prompt_logprobs_token_ids),
    Replacement("sample.penalties", "_bincount_kernel", penalties.count_tokens),
    Replacement("sample.penalties", "_penalties_kernel", penalties.apply_penalties),
    Replacement("sample.logit_bias", "_bias_kernel", logit_bias.apply_logit_bias),
    Replacement("sample.bad_words", "_bad_words_kernel", logit_bias.apply_bad_words),
    Replacement("structured_outputs", "_apply_grammar_bitmask_kernel", grammar.apply_grammar_bitmask),
    Replacement("spec_decode.rejection_sampler", "_gather_draft_sampled_kernel", verification.gather_draft_sampled),
    Replacement("spec_decode.rejection_sampler", "_flatten_sampled_kernel", verification.flatten_sampled),
    Replacement("spec_decode.rejection_sampler_utils", "rejection_sample", verification.rejection_sample),
    Replacement(
        "spec_decode.target_dependent_ar.speculator", "_prepare_prefill_inputs_kernel", heads.prepare_prefill_inputs
    ),
    Replacement(
        "spec_decode.target_dependent_ar.speculator", "_prepare_decode_inputs_kernel", heads.prepare_decode_inputs
    ),
    Replacement("spec_decode.target_dependent_ar.speculator", "_update_draft_inputs_kernel", heads.update_draft_inputs),
    Replacement(
        "spec_decode.standalone_ar.speculator", "_prepare_prefill_inputs_kernel", draft_models.prepare_prefill_inputs
    ),
    Replacement("spec_decode.dflash.speculator", "_prepare_dflash_inputs_kernel", block_drafts.prepare_inputs),
    Replacement("spec_decode.dflash2.speculator", "_selector_walk_kernel", block_drafts.walk),
    Replacement("utils.KVBlockZeroer", "zero_block_ids", zeroed_pages.zero_block_ids, "vllm.v1.worker"),
    Replacement("gdn_attention", "_spec_forward", linear_attention.forward, "vllm.model_executor.layers.mamba.ops.cpu"),
    Replacement("mamba_utils", "_TEMPORAL_TILES", 1, "vllm.v1.worker"),  # an interpreter works on one after the other
    *(Replacement("ops.torch_ops.lora_ops", name, ours, "vllm.lora") for name, ours in lora_ops.OPERATIONS.items()),
    *(Replacement("punica_wrapper.punica_cpu", name, ours, "vllm.lora") for name, ours in lora_ops.OPERATIONS.items()),
)

LEFT_INTERPRETED = {
    "cp_utils": "context parallelism",
    "metrics.logits": "a search for NaN that a variable of vLLM's turns on",
    "mm.rope": "positions of images",
    "model_states.mamba_hybrid": "state-space models",
    "model_states.prompt_embeds": "prompts given as embeddings",
    "model_states.recoverssm": "state-space models",
    "sample.batch_shard": "sampling that is spread over ranks",
    "sample.gumbel": "sampling in float64",
    "sample.output": "masks of what could have been sampled",
    "sample.thinking_budget": "budgets of reasoning models",
    "sample.trace_replay": "replayed traces",
    "sample.watermark": "watermarks",
    "spec_decode.acceptance_estimator": "adaptive verification",
    "spec_decode.dflash2.speculator": "DFlash",
    "spec_decode.multi_module_mtp.speculator": "multi-token prediction",
    "spec_decode.ngram.speculator": "vLLM's own prompt lookup",
    "spec_decode.xpress.kernels": "XPress",
    "spec_decode.rejection_sampler_utils": "what our rejection_sample hands on: see there",
}
"""Purpose of a module's kernels without a stand-in. None of them is part of a step that Outrider orders."""


def put_in_place(replacements: Iterable[Replacement] = REPLACEMENTS) -> None:
    """Install stand-ins. Idempotent."""
    for replacement in replacements:
        owner = pkgutil.resolve_name(f"{replacement.root}.{replacement.module}")
        theirs = getattr(owner, replacement.attribute)
        if isinstance(theirs, StandIn) or theirs is replacement.ours:
            continue
        if replacement.root == RUNNER:
            rebind(theirs, StandIn(theirs, replacement.ours) if replacement.is_kernel else replacement.ours)
        else:
            setattr(owner, replacement.attribute, replacement.ours)


def rebind(theirs: Any, ours: Any) -> None:
    """Replace `theirs` by `ours` in every module of the runner that has it by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(RUNNER):
            for attribute, value in list(vars(module).items()):
                if value is theirs:
                    setattr(module, attribute, ours)
