"""An EAGLE-3 head as a member of the pool: beside others it needs names of its own, and hidden states of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle import utils
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from outrider_runtime.vllm_plugin.graphs import offer_whole_graphs
from outrider_runtime.vllm_plugin.layer_names import named
from outrider_runtime.vllm_plugin.whole_weights import FROM_TARGET, check_token_map, whole_weights


class FirstPassGraphs(SpeculatorCudaGraphManager):  # type: ignore[misc]  # vLLM is untyped here
    """Of the first pass, which runs over the target's batch and reads its attention's metadata: the graph must be that
    of the target, and vLLM does not say how long requests are here."""

    longest: int | None = None
    """Tokens of the longest request of the batch; None while one reads its prompt."""

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return super().dispatch(*args, **{**kwargs, "max_query_len": self.longest})


class EagleHead(EagleSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(self, vllm_config: Any, device: torch.device, prefix: str | None) -> None:
        """prefix: see `named`."""
        super().__init__(vllm_config, device)
        self.any_length_fits = False
        """Whether whole graphs of the target take requests of different lengths."""
        self._prefix = prefix
        self._places: list[int] | None = None

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        with named(utils, self._prefix), whole_weights(self.vllm_config.load_config.load_format, FROM_TARGET):
            head = super().load_draft_model(target_model, target_attn_layer_names)
        check_token_map(head, self.vllm_config.model_config.get_vocab_size())
        self._check_layers(head, len(self.layers(target_model)))
        return head

    def _check_layers(self, head: Any, read: int) -> None:
        """read: layers of the target, after which it reads the hidden states."""
        width: int = self.vllm_config.model_config.get_hidden_size()
        joining = getattr(head.model, "fc", None)  # makes one state of all that it reads; not every head has one
        joined: int = getattr(joining, "input_size", read * width)
        if joined != read * width:
            made_for = f"the EAGLE-3 head is made for the hidden states of {joined / width:g} layers"
            raise ValueError(f"{made_for}, and is to read {read} (eagle_aux_hidden_state_layer_ids)")

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        self.prefill_cudagraph_manager = FirstPassGraphs(
            self.vllm_config, self.device, cudagraph_mode, self.num_speculative_steps + 1,
            varlen_decode=self.any_length_fits,
        )  # fmt: skip
        offer_whole_graphs(self.prefill_cudagraph_manager)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.prefill_cudagraph_manager is not None:  # not yet there when vLLM measures memory
            longest = None if input_batch.has_prefill else int(input_batch.num_scheduled_tokens.max())
            self.prefill_cudagraph_manager.longest = longest
        made: torch.Tensor = super().propose(input_batch, *args, **kwargs)
        return made

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
