"""Makes the pool's members, each with a config of its own, and their speculator (worker process)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from outrider_crds.draft_pool import DrafterSpec, DraftMethod
from outrider_crds.runtime_state import DrafterMemory
from vllm.config import SpeculativeConfig
from vllm.distributed.parallel_state import get_tp_group

from outrider_runtime.drafters.draft_configs import too_few_positions
from outrider_runtime.drafters.draft_model import keeps_state
from outrider_runtime.drafters.kept_answers import kept_answers
from outrider_runtime.drafters.pool import window_too_long
from outrider_runtime.drafters.suffix import match_lengths
from outrider_runtime.drafters.window import window_of
from outrider_runtime.vllm_plugin.adapters import Rows
from outrider_runtime.vllm_plugin.agreement import Agreement
from outrider_runtime.vllm_plugin.arguments import block_checkpoint, member_config
from outrider_runtime.vllm_plugin.block_draft import block_draft
from outrider_runtime.vllm_plugin.draft_model_member import DraftModelMember
from outrider_runtime.vllm_plugin.eagle_head import EagleHead
from outrider_runtime.vllm_plugin.launch import LaunchPlan, note_failure, note_failure_elsewhere, start_failure
from outrider_runtime.vllm_plugin.mtp_head import MTPHead
from outrider_runtime.vllm_plugin.sparse_self_member import SparseSelfMember
from outrider_runtime.vllm_plugin.speculator import PoolSpeculator
from outrider_runtime.vllm_plugin.suffix_member import SuffixMember
from outrider_runtime.worker_notes import write_drafter_layers, write_drafter_memory


def _check_limits(drafter: DrafterSpec, config: Any) -> None:
    """Raise ValueError if a drafter's limits are below the engine's longest request, or its layers keep a state.

    It uses what vLLM has resolved: lengths include `--hf-overrides`, and model classes are known that a config.json
    does not tell apart.
    """
    longest = config.model_config.max_model_len
    sentence = window_too_long(drafter, longest)
    draft = config.speculative_config.draft_model_config
    if drafter.method is DraftMethod.BLOCK:
        positions = getattr(draft.hf_text_config, "max_position_embeddings", None)
        sentence = sentence or too_few_positions(positions, longest)
    if drafter.method is DraftMethod.DRAFT_MODEL:
        state = draft.architecture if draft.is_hybrid or draft.is_attention_free else ""
        sentence = sentence or keeps_state(state) or too_few_positions(draft.max_model_len, longest)
    if sentence:
        raise ValueError(sentence)


def _sharing_names(hosted: Sequence[DrafterSpec]) -> set[int]:
    """Return the numbers of drafters whose layer names may collide with another drafter's, so that they get a prefix.

    Draft models count layers from 0. Heads, block drafters and MTP continue after the target's last layer. MTP keeps
    vLLM's names, since quantised checkpoints name the layers that are not quantised.
    """
    heads = (DraftMethod.EAGLE, DraftMethod.BLOCK)
    kinds = ["head" if drafter.method in heads else drafter.method.value for drafter in hosted]
    like_mtp = {number for number, kind in enumerate(kinds) if kind == "head" and DraftMethod.MTP in kinds}
    return like_mtp | {number for number, kind in enumerate(kinds) if kind in kinds[:number]}


def _member(
    drafter: DrafterSpec, plan: LaunchPlan, config: Any, device: torch.device, req_states: Any,
    adapt: Callable[[Rows], None],
) -> Any:  # fmt: skip
    number = plan.pool.hosted.index(drafter)
    prefix = f"drafter_{number}" if number in _sharing_names(plan.pool.hosted) else None
    if drafter.method is DraftMethod.BLOCK:
        return block_draft(config, device, prefix, block_checkpoint(drafter, plan).tokens)
    heads = {DraftMethod.EAGLE: EagleHead, DraftMethod.MTP: MTPHead}
    if drafter.method in heads:
        return heads[drafter.method](config, device, prefix)
    window = window_of(drafter)
    if drafter.method is DraftMethod.DRAFT_MODEL:
        return DraftModelMember(config, device, req_states, prefix, window)
    if window is not None:
        return SparseSelfMember(config, device, window, adapt)
    match = match_lengths(drafter)
    assert match is not None
    return SuffixMember(config, device, req_states, match, kept_answers(drafter))


def pool_speculator(
    plan: LaunchPlan, agree: Agreement, adapt: Callable[[Rows], None], vllm_config: Any, device: torch.device,
    req_states: Any,
) -> PoolSpeculator:  # fmt: skip
    """Make the speculator of the pool. adapt: see `SparseSelfMember`."""

    def make(drafter: DrafterSpec) -> Any:
        """Make a member from the engine's config, with a speculative config of its own."""
        config = copy.copy(vllm_config)
        if drafter != plan.pool.primary:
            config.speculative_config = SpeculativeConfig(
                target_model_config=vllm_config.model_config,
                target_parallel_config=vllm_config.parallel_config,
                **member_config(drafter, plan),
            )
        _check_limits(drafter, config)
        return _member(drafter, plan, config, device, req_states, adapt)

    def left_out(name: str, error: Exception | None) -> None:
        if error is None:
            note_failure_elsewhere(name)
        else:
            note_failure(name, start_failure(error))

    def note_memory(memory: dict[str, DrafterMemory], layers: dict[str, set[str]]) -> None:
        if get_tp_group().rank_in_group == 0:
            write_drafter_memory(plan.paths.run_dir, memory)
            write_drafter_layers(plan.paths.run_dir, layers)

    members = [(drafter.name, partial(make, drafter)) for drafter in plan.pool.hosted]
    return PoolSpeculator(members, vllm_config, device, left_out, agree, note_memory)
