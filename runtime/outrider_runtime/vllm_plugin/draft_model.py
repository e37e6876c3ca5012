"""A draft model as a member of the pool: vLLM's speculator, which proposes as many tokens as are asked for, and can run
over tokens that it has missed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from outrider_runtime.loop.caches import Hole
from outrider_runtime.vllm_plugin.layer_names import named


class DraftModel(StandaloneARSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any, prefix: str | None) -> None:
        """prefix: see `named`."""
        super().__init__(_with_room_for_its_own_tokens(vllm_config), device)
        self._req_states = req_states
        self._prefix = prefix
        self._most_tokens: int = vllm_config.speculative_config.num_speculative_tokens

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        with named(speculator, self._prefix):
            return super().load_draft_model(target_model, target_attn_layer_names)

    def propose(self, *arguments: Any, num_speculative_tokens: int | None = None, **keywords: Any) -> torch.Tensor:
        """vLLM's own ignores the number and always proposes the most. 0: the first pass, which writes KV."""
        wanted = self._most_tokens if num_speculative_tokens is None else num_speculative_tokens
        self.num_speculative_steps = max(1, wanted)
        try:
            made: torch.Tensor = super().propose(*arguments, **keywords)
            return made
        finally:
            self.num_speculative_steps = self._most_tokens

    @torch.inference_mode()
    def close_holes(self, holes: Sequence[Hole], input_batch: Any) -> None:
        """Write the draft's KV of `holes`; `request` is the row of the batch."""
        slots = input_batch.idx_mapping_np[[hole.request for hole in holes]]
        starts = np.array([hole.start for hole in holes], dtype=np.int64)
        lengths = np.array([hole.end for hole in holes], dtype=np.int64) - starts
        ends_np = np.concatenate(([0], lengths.cumsum())).astype(np.int32)  # (holes + 1,)
        rows = self._there(slots.astype(np.int64))
        positions = self._there(np.repeat(starts - ends_np[:-1], lengths) + np.arange(ends_np[-1]))
        tokens = self._req_states.all_token_ids.gpu[self._there(np.repeat(slots, lengths).astype(np.int64)), positions]
        buffers = self.input_buffers
        buffers.query_start_loc[: len(holes) + 1] = self._there(ends_np)
        buffers.seq_lens[: len(holes)] = self._there((starts + lengths).astype(np.int32))
        self.block_tables.gather_block_tables(rows, num_reqs_padded=len(holes))
        try:
            self._run_over(tokens, positions, rows, ends_np, torch.from_numpy(starts + lengths).int())
        finally:  # the step's own tables, which the members' metadata points into
            self.block_tables.gather_block_tables(
                input_batch.idx_mapping, num_reqs_padded=input_batch.num_reqs_after_padding
            )

    def _run_over(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, starts: np.ndarray[Any, Any],
        seq_lens: torch.Tensor,
    ) -> None:  # fmt: skip
        """tokens, positions: (tokens,); rows, seq_lens: (holes,); starts: (holes + 1,), of each hole's tokens."""
        count, holes = len(tokens), len(rows)
        slot_mappings = self.block_tables.compute_slot_mappings(
            rows, self.input_buffers.query_start_loc[: holes + 1], positions, count, out=self.expanded_slot_mappings
        )
        metadata = self._build_attn_metadata(
            num_reqs=holes,
            batch_desc=BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=holes),
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=seq_lens,
            step=0,
            slot_mappings=slot_mappings,
        )
        by_layer = build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)
        self._run_model(tokens, positions, metadata, by_layer, None)

    def _there(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        here = torch.from_numpy(values)
        return here if self.device.type == "cpu" else here.pin_memory().to(self.device, non_blocking=True)


def _with_room_for_its_own_tokens(vllm_config: Any) -> Any:
    """Its first pass takes one more token of each request than the target's."""
    config = copy.copy(vllm_config)
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens += config.scheduler_config.max_num_seqs
    return config
