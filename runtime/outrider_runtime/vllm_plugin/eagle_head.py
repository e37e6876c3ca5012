"""An EAGLE-3 head as a member of the pool: beside others it needs names of its own, and hidden states of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle import utils
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from outrider_runtime.vllm_plugin.graphs import offer_whole_graphs
from outrider_runtime.vllm_plugin.layer_names import named
from outrider_runtime.vllm_plugin.whole_weights import whole_weights


class EagleHead(EagleSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(self, vllm_config: Any, device: torch.device, prefix: str | None) -> None:
        """prefix: see `named`."""
        super().__init__(vllm_config, device)
        self._prefix = prefix
        self._places: list[int] | None = None

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        with named(utils, self._prefix), whole_weights():
            return super().load_draft_model(target_model, target_attn_layer_names)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        offer_whole_graphs(self.prefill_cudagraph_manager)

    def layers(self, target_model: Any) -> set[int]:
        """Of the target, after which it reads the hidden states."""
        wanted = get_eagle3_aux_layers_from_config(self.speculative_config)
        return {*(wanted or target_model.get_eagle3_default_aux_hidden_state_layers())}

    def reads(self, target_model: Any, handed_out: set[int]) -> None:
        """handed_out: layers whose hidden states the target gives, in their order."""
        mine = self.layers(target_model)
        self._places = [place for place, layer in enumerate(sorted(handed_out)) if layer in mine]

    def its_own(self, aux_hidden_states: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Of all that the target handed out, each (tokens, width), those that the head was trained on."""
        if aux_hidden_states is None or self._places is None:
            return aux_hidden_states
        return [aux_hidden_states[place] for place in self._places]
