"""A draft model as a member of the pool.

It is vLLM's speculator with a variable draft length, catch-up over KV gaps, and an optional bounded context.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, prepare_inputs_to_capture
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from outrider_runtime.drafters.window import Window
from outrider_runtime.loop.draft_caches import KVGap
from outrider_runtime.vllm_plugin.confident import Confident
from outrider_runtime.vllm_plugin.decode_passes import DecodePasses
from outrider_runtime.vllm_plugin.layer_names import named
from outrider_runtime.vllm_plugin.patches import DRAFT_MODEL_LOADER
from outrider_runtime.vllm_plugin.short_tables import ShortTables, check_plain
from outrider_runtime.vllm_plugin.whole_weights import whole_weights


class DraftModelMember(Confident, DecodePasses, StandaloneARSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, prefix: str | None, window: Window | None = None
    ) -> None:  # fmt: skip
        """prefix: see `named`. window: the context that each pass reads of a request; None: all of it."""
        super().__init__(_with_room_for_its_own_tokens(vllm_config), device)
        self._req_states = req_states
        self._prefix = prefix
        self._window = window
        self._short: ShortTables | None = None
        self._most_tokens: int = vllm_config.speculative_config.num_speculative_tokens

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        with named(DRAFT_MODEL_LOADER, self._prefix), whole_weights(self.vllm_config.load_config.load_format):
            return super().load_draft_model(target_model, target_attn_layer_names)

    def load_model(self, target_model: Any) -> None:
        """Load the draft. Raises ValueError if its layers keep a state, or if it has a window and its attention cannot
        be bounded."""
        super().load_model(target_model)
        if self._window is not None:
            layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.draft_attn_layer_names)
            specs = [layer.get_kv_cache_spec(self.vllm_config) for layer in layers.values()]
            check_plain(specs, self.dcp_size, "the draft's", "remove windowTokens")

    def set_attn(self, *arguments: Any) -> None:
        super().set_attn(*arguments)
        if self._window is not None:
            self._short = ShortTables(self._window, self)

    def _build_attn_metadata(
        self, num_reqs: int, batch_desc: BatchExecutionDescriptor, query_start_loc_np: np.ndarray[Any, Any],
        seq_lens_cpu_upper_bound: torch.Tensor, step: int, *, slot_mappings: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        """Build the metadata of the first pass, of those that fill KV gaps, and of later ones without a window."""
        if self._short is None:
            return super()._build_attn_metadata(
                num_reqs, batch_desc, query_start_loc_np, seq_lens_cpu_upper_bound, step,
                slot_mappings=slot_mappings, **more,
            )  # fmt: skip
        count, buffers = int(query_start_loc_np[num_reqs]), self.input_buffers
        mappings = self.block_tables.slot_mappings[:, :count] if slot_mappings is None else slot_mappings
        return self._short.metadata(
            self.block_tables.input_block_tables[self._short.group][:num_reqs], buffers.seq_lens[:num_reqs],
            buffers.query_start_loc[: num_reqs + 1], torch.from_numpy(query_start_loc_np[: num_reqs + 1]).int(),
            seq_lens_cpu_upper_bound[:num_reqs] + step, mappings, buffers.positions[:count],
        )  # fmt: skip

    def _pass_metadata(
        self, rows: int, graph: BatchExecutionDescriptor, most_seen: torch.Tensor, step: int,
        slot_mappings: torch.Tensor,
    ) -> Any:  # fmt: skip
        if self._short is not None:
            return self._short.of_a_pass(
                self.block_tables.input_block_tables[self._short.group][:rows], self.input_buffers, graph,
                most_seen[:rows] + step + 1, slot_mappings,
            )  # fmt: skip
        return self._build_uniform_attn_metadata(
            batch_desc=graph, num_reqs=rows, num_query_per_req=1, seq_lens_cpu_upper_bound=most_seen, step=step + 1
        )

    def _metadata_to_capture(self, rows: int, slot_mappings: torch.Tensor) -> Any:
        if self._short is not None:
            return self._short.to_capture(rows, self.input_buffers, slot_mappings)
        return prepare_inputs_to_capture(
            rows, rows, self.model_state, self.input_buffers, self.block_tables, self.attn_groups, self.kv_cache_config,
            full_cudagraph=True, max_query_len=1,
        ).attn_metadata  # fmt: skip

    def _multi_step_decode(
        self, input_batch: Any, num_rejected: torch.Tensor, num_reqs: int, skip_attn: bool,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """vLLM's own, whose passes no graph can hold: it reads the number of each on the host."""
        if skip_attn:
            super()._multi_step_decode(input_batch, num_rejected, num_reqs, skip_attn, num_tokens_across_dp)
            return
        last = self.expanded_positions[self.last_token_indices[:num_reqs]]
        # With the token that its first pass took in place of the first rejected one, and the one that it drafted.
        seen = input_batch.seq_lens[:num_reqs] - num_rejected[:num_reqs] + 2
        self._begin_passes(self.draft_tokens[:num_reqs, 0], last + 1, seen)
        self._run_passes(num_reqs, range(1, self.num_speculative_steps), input_batch.seq_lens_cpu_upper_bound)

    def propose(self, *arguments: Any, num_speculative_tokens: int | None = None, **keywords: Any) -> torch.Tensor:
        """Propose this many tokens; vLLM's own method always proposes the most. 0: the first pass, which writes KV."""
        length = self._most_tokens if num_speculative_tokens is None else num_speculative_tokens
        self.num_speculative_steps = max(1, length)
        try:
            made: torch.Tensor = super().propose(*arguments, **keywords)
            return made
        finally:
            self.num_speculative_steps = self._most_tokens

    @torch.inference_mode()
    def fill_gaps(self, gaps: Sequence[KVGap], input_batch: Any) -> None:
        """Write the draft's KV of `gaps`; `request` is the row of the batch."""
        slots = input_batch.idx_mapping_np[[gap.request for gap in gaps]]
        starts = np.array([gap.start for gap in gaps], dtype=np.int64)
        lengths = np.array([gap.end for gap in gaps], dtype=np.int64) - starts
        ends_np = np.concatenate(([0], lengths.cumsum())).astype(np.int32)  # (gaps + 1,)
        rows = self._there(slots.astype(np.int64))
        positions = self._there(np.repeat(starts - ends_np[:-1], lengths) + np.arange(ends_np[-1]))
        tokens = self._req_states.all_token_ids.gpu[self._there(np.repeat(slots, lengths).astype(np.int64)), positions]
        buffers = self.input_buffers
        buffers.query_start_loc[: len(gaps) + 1] = self._there(ends_np)
        buffers.seq_lens[: len(gaps)] = self._there((starts + lengths).astype(np.int32))
        self.block_tables.gather_block_tables(rows, num_reqs_padded=len(gaps))
        try:
            self._run_over(tokens, positions, rows, ends_np, torch.from_numpy(starts + lengths).int())
        finally:  # restore the step's own tables, which the members' metadata points into
            self.block_tables.gather_block_tables(
                input_batch.idx_mapping, num_reqs_padded=input_batch.num_reqs_after_padding
            )

    def _run_over(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, starts: np.ndarray[Any, Any],
        seq_lens: torch.Tensor,
    ) -> None:  # fmt: skip
        """Run the draft over the gaps' tokens.

        tokens, positions: (tokens,); rows, seq_lens: (gaps,); starts: (gaps + 1,), offsets of each gap's tokens.
        """
        count, gaps = len(tokens), len(rows)
        slot_mappings = self.block_tables.compute_slot_mappings(
            rows, self.input_buffers.query_start_loc[: gaps + 1], positions, count, out=self.expanded_slot_mappings
        )
        metadata = self._build_attn_metadata(
            num_reqs=gaps,
            batch_desc=BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=count, num_reqs=gaps),
            query_start_loc_np=starts,
            seq_lens_cpu_upper_bound=seq_lens,
            step=0,
            slot_mappings=slot_mappings,
        )
        by_layer = build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config)
        self._run_model(tokens, positions, metadata, by_layer, None)

    def _there(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        there: torch.Tensor = async_tensor_h2d(values, device=self.device)
        return there


def _with_room_for_its_own_tokens(vllm_config: Any) -> Any:
    """Return a config with a larger token budget: the first pass takes one more token of each request."""
    config = copy.copy(vllm_config)
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens += config.scheduler_config.max_num_seqs
    return config
