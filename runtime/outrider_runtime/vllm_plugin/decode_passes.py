"""Passes of a draft over one token of each request, in whole CUDA graphs where its attention can be captured.

One graph for each batch size serves every pass and every draft length: a pass reads its step's number from the device
and leaves the next pass's inputs behind. vLLM captures the passes of heads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch


class DecodePasses:
    """A base before vLLM's standalone speculator."""

    attn_cg_support: Any
    block_tables: Any
    current_draft_step: torch.Tensor
    device: torch.device
    draft_logits: torch.Tensor | None
    draft_tokens: torch.Tensor
    idx_mapping: torch.Tensor
    input_buffers: Any
    kv_cache_config: Any
    max_model_len: int
    seeds: torch.Tensor
    temperature: torch.Tensor
    vllm_config: Any
    _graphs: Any = None
    """None before the engine has its memory."""

    def _pass_metadata(
        self, rows: int, graph: BatchExecutionDescriptor, most_seen: torch.Tensor, step: int,
        slot_mappings: torch.Tensor,
    ) -> Any:  # fmt: skip
        """The attention's, of pass number `step`. most_seen: (rows,) on the host, tokens of each request at most when
        the drafts begin."""
        raise NotImplementedError

    def _metadata_to_capture(self, rows: int, slot_mappings: torch.Tensor) -> Any:
        """Metadata for a graph, over the very tensors that `_pass_metadata` uses."""
        raise NotImplementedError

    def _slot_buffer(self) -> torch.Tensor | None:
        """(KV groups, tokens) that slot mappings are written to; None: the engine's."""
        return None

    @property
    def _can_be_captured(self) -> bool:
        """An adapter is chosen on the host for each request, and context parallelism splits lengths there."""
        narrowest: int = self.attn_cg_support.min_cg_support.value
        return (
            narrowest >= AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value
            and self.vllm_config.lora_config is None
            and self.vllm_config.parallel_config.decode_context_parallel_size == 1
            and self.vllm_config.parallel_config.data_parallel_size == 1
        )

    # -- what the pool calls while the engine starts ----------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        whole = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL and self._can_be_captured
        mode = CUDAGraphMode.FULL_DECODE_ONLY if whole else CUDAGraphMode.NONE
        self._graphs = CudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1)

    def capture(self) -> None:
        if self._graphs.needs_capture():
            self._graphs.capture(self._to_capture, "Capturing passes of a draft")

    def _to_capture(self, graph: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:  # noqa: ARG002
        """A pass over requests of no tokens, which writes no KV."""
        rows = graph.num_reqs
        InputBatch.make_dummy(rows, rows, self.input_buffers)
        self.idx_mapping.fill_(-1)
        self.current_draft_step.fill_(0)
        self.block_tables.get_dummy_block_tables(rows)
        mappings = self.block_tables.get_dummy_slot_mappings(rows)
        buffer = self._slot_buffer()
        if buffer is not None:
            buffer.copy_(self.block_tables.slot_mappings[:, : buffer.shape[1]])
            mappings = buffer[:, :rows]
        metadata = self._metadata_to_capture(rows, mappings)
        by_layer = build_slot_mappings_by_layer(mappings, self.kv_cache_config)
        return lambda _mode: self._pass(rows, metadata, by_layer)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _begin_passes(self, tokens: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> None:
        """All (rows,): each request's token of the first pass, its position, and tokens with it."""
        rows, buffers = len(tokens), self.input_buffers
        buffers.input_ids[:rows] = tokens.to(torch.int32)
        buffers.positions[:rows] = positions.clamp(max=self.max_model_len - 1)
        buffers.seq_lens[:rows] = seen.clamp(max=self.max_model_len).to(torch.int32)
        buffers.seq_lens[rows:].zero_()
        starts = torch.arange(len(buffers.query_start_loc), dtype=torch.int32, device=self.device)
        buffers.query_start_loc.copy_(starts.clamp(max=rows))

    def _run_passes(self, rows: int, steps: Iterable[int], most_seen: torch.Tensor) -> None:
        """Fill `draft_tokens` in the columns `steps`. `idx_mapping` is set, and negative behind `rows`."""
        buffers, graph = self.input_buffers, self._graph_for(rows)
        starts, positions = buffers.query_start_loc[: rows + 1], buffers.positions[:rows]
        for step in steps:
            mappings = self.block_tables.compute_slot_mappings(
                self.idx_mapping[:rows], starts, positions, graph.num_tokens, out=self._slot_buffer()
            )
            self.current_draft_step.fill_(step)
            metadata = self._pass_metadata(rows, graph, most_seen, step, mappings)
            if graph.cg_mode == CUDAGraphMode.FULL:
                self._graphs.run_fullgraph(graph)
            else:
                self._pass(rows, metadata, build_slot_mappings_by_layer(mappings, self.kv_cache_config))

    def _graph_for(self, rows: int) -> BatchExecutionDescriptor:
        if self._graphs is not None:
            return self._graphs.dispatch(rows, rows, uniform_token_count=1, num_active_loras=0)
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=rows, num_reqs=rows)

    def _pass(self, rows: int, metadata: Any, by_layer: Any) -> None:
        """Draft a token of each request, and leave the inputs of the next pass. Nothing here is read by the host."""
        buffers = self.input_buffers
        tokens, positions, seen = buffers.input_ids[:rows], buffers.positions[:rows], buffers.seq_lens[:rows]
        hidden_states = self._run_model(tokens, positions, metadata, by_layer, None)  # type: ignore[attr-defined]
        drafted = self.sample_draft(  # type: ignore[attr-defined]
            hidden_states, positions, self.idx_mapping[:rows], self.temperature, self.seeds,
            self.current_draft_step, self.draft_logits,
        )  # fmt: skip
        self.draft_tokens[:rows].scatter_(1, self.current_draft_step.expand(rows, 1), drafted[:, None])
        tokens.copy_(drafted)
        torch.clamp(positions + 1, max=self.max_model_len - 1, out=positions)
        torch.clamp(seen + 1, max=self.max_model_len, out=seen)
