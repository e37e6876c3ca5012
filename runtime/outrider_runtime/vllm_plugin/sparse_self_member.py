"""Sparse self-speculation as a member of the pool: the target drafts over a request's first and last pages.

It needs only a shorter block table over the target's own KV. A pass writes the KV of its token into slots behind the
last computed token, where the target will write it; the scheduler reserves them, and no other request shares them. The
target's next step overwrites the tokens that it verifies, and the rest is not read before it is written again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import init_attn_backend
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from outrider_runtime.drafters.window import Window
from outrider_runtime.vllm_plugin.adapters import Rows
from outrider_runtime.vllm_plugin.confident import Confident
from outrider_runtime.vllm_plugin.decode_passes import DecodePasses
from outrider_runtime.vllm_plugin.short_tables import ShortTables, check_plain

NOT_A_TOKEN = -1


class SparseSelfMember(Confident, DecodePasses, StandaloneARSpeculator):  # type: ignore[misc]  # vLLM is untyped
    num_extra_query_per_req = 0

    def __init__(
        self, vllm_config: Any, device: torch.device, window: Window, adapt: Callable[[Rows], None]
    ) -> None:  # fmt: skip
        """adapt: activates the LoRA adapters of these rows for passes over one token of each."""
        super().__init__(vllm_config, device)
        self._window = window
        self._adapt = adapt
        self._most_tokens: int = vllm_config.speculative_config.num_speculative_tokens

    # -- start --------------------------------------------------------------------------------------------------

    def load_model(self, target_model: Any) -> None:
        """Use the target. Raises ValueError if its attention cannot be bounded."""
        self.model = target_model
        self.draft_attn_layer_names: set[str] = set()
        modules = {*target_model.modules()}
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        self._layers = {name: layer for name, layer in layers.items() if layer in modules}
        specs = [layer.get_kv_cache_spec(self.vllm_config) for layer in self._layers.values()]
        check_plain(specs, self.dcp_size, "the target's", "SparseSelf cannot shorten it; remove it")
        if self.vllm_config.model_config.uses_mrope:
            raise ValueError("the target's positions have several dimensions (M-RoPE), SparseSelf knows one: remove it")

    def set_attn(
        self, _model_state: Any, kv_cache_config: Any, block_tables: Any, _input_buffers: Any, _attn_groups: Any
    ) -> None:  # fmt: skip
        self.kv_cache_config, self.block_tables = kv_cache_config, block_tables
        self.attn_groups, self.attn_cg_support, _ = init_attn_backend(
            kv_cache_config, self.vllm_config, self.device, active_layer_names={*self._layers}
        )
        self._short = ShortTables(self._window, self)
        self._slot_mappings = torch.empty_like(block_tables.slot_mappings[:, : self.max_num_reqs])

    # -- one step -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(  # vLLM calls it by position while it serves, and by name while it measures memory on a GPU
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: Any,  # noqa: ARG002
        aux_hidden_states: Any, num_sampled: Any, num_rejected: torch.Tensor, last_sampled: torch.Tensor,  # noqa: ARG002
        *_arguments: Any, rows: Rows | None = None, num_speculative_tokens: int | None = None,
        dummy_run: bool = False, **_keywords: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Propose (requests, passes) for `rows` of the batch; None: all rows. Other rows are `NOT_A_TOKEN`."""
        passes = self._most_tokens if num_speculative_tokens is None else num_speculative_tokens
        made = torch.full((input_batch.num_reqs, passes), NOT_A_TOKEN, dtype=torch.int64, device=self.device)
        rows = np.arange(input_batch.num_reqs) if rows is None else rows
        if dummy_run or not len(rows):
            return made
        self._adapt(rows)
        there = async_tensor_h2d(rows, device=self.device)
        slots = input_batch.idx_mapping[there]
        # (rows,): position of the last sampled token
        first = (input_batch.seq_lens[there] - num_rejected[there]).to(torch.int64)
        self.idx_mapping.fill_(-1)
        self.idx_mapping[: len(rows)] = slots
        self._begin_passes(last_sampled.view(-1)[slots], first, first + 1)
        self._run_passes(len(rows), range(passes), input_batch.seq_lens_cpu_upper_bound[torch.from_numpy(rows)])
        positions = first[:, None] + torch.arange(passes, device=self.device)  # (rows, passes)
        drafted = self.draft_tokens[: len(rows), :passes]
        made[there] = torch.where(positions < self.max_model_len, drafted, NOT_A_TOKEN)
        return made

    def _slot_buffer(self) -> torch.Tensor:
        return self._slot_mappings

    def _pass_metadata(
        self, rows: int, graph: BatchExecutionDescriptor, most_seen: torch.Tensor, step: int,
        slot_mappings: torch.Tensor,
    ) -> Any:  # fmt: skip
        table = self._short.of_requests[self.idx_mapping[:rows]]
        return self._short.of_a_pass(table, self.input_buffers, graph, most_seen + step + 1, slot_mappings)

    def _metadata_to_capture(self, rows: int, slot_mappings: torch.Tensor) -> Any:
        return self._short.to_capture(rows, self.input_buffers, slot_mappings)
