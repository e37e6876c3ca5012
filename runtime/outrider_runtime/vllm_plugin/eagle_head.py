"""An EAGLE-3 head as a member of the pool, with layer names and hidden states of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from outrider_runtime.vllm_plugin.confident import Confident
from outrider_runtime.vllm_plugin.graphs import offer_whole_graphs
from outrider_runtime.vllm_plugin.layer_names import named
from outrider_runtime.vllm_plugin.patches import HEAD_LOADER
from outrider_runtime.vllm_plugin.reads_layers import ReadsLayers
from outrider_runtime.vllm_plugin.whole_weights import FROM_TARGET, check_token_map, whole_weights


class FirstPassGraphs(SpeculatorCudaGraphManager):  # type: ignore[misc]  # vLLM is untyped here
    """CUDA graphs of the first pass, which runs over the target's batch and reads the metadata of its attention.

    So the graph must be the one that the target uses. vLLM does not pass the length of the longest request here.
    """

    longest: int | None = None
    """Tokens of the longest request of the batch; None if the batch has a prefill."""

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return super().dispatch(*args, **{**kwargs, "max_query_len": self.longest})


class FirstPass:
    """A speculator whose first pass runs over the target's batch: a base class before vLLM's speculator."""

    vllm_config: Any
    device: torch.device
    num_speculative_steps: int
    any_length_fits = False
    """Whether full CUDA graphs of the target take requests of different lengths."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        super().init_cudagraph_manager(cudagraph_mode)  # type: ignore[misc]
        self.prefill_cudagraph_manager = FirstPassGraphs(
            self.vllm_config, self.device, cudagraph_mode, self.num_speculative_steps + 1,
            varlen_decode=self.any_length_fits,
        )  # fmt: skip
        offer_whole_graphs(self.prefill_cudagraph_manager)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.prefill_cudagraph_manager is not None:  # not yet there when vLLM measures memory
            longest = None if input_batch.has_prefill else int(input_batch.num_scheduled_tokens.max())
            self.prefill_cudagraph_manager.longest = longest
        made: torch.Tensor = super().propose(input_batch, *args, **kwargs)  # type: ignore[misc]
        return made


class EagleHead(Confident, ReadsLayers, FirstPass, EagleSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(self, vllm_config: Any, device: torch.device, prefix: str | None) -> None:
        """prefix: see `named`."""
        super().__init__(vllm_config, device)
        self._prefix = prefix

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        with named(HEAD_LOADER, self._prefix), whole_weights(self.vllm_config.load_config.load_format, FROM_TARGET):
            head = super().load_draft_model(target_model, target_attn_layer_names)
        check_token_map(head, self.vllm_config.model_config.get_vocab_size())
        self.check_layers(head, target_model)
        return head
