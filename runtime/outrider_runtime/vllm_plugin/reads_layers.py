"""Members that read hidden states between the target's layers, each after layers of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config


class ReadsLayers:
    """Selects the hidden states of a member: a base class before vLLM's speculator."""

    speculative_config: Any
    vllm_config: Any
    _places: list[int] | None = None

    def layers(self, target_model: Any) -> set[int]:
        """Return the numbers of the target's layers after which the member reads hidden states."""
        named_in_config = get_eagle3_aux_layers_from_config(self.speculative_config)
        return {*(named_in_config or target_model.get_eagle3_default_aux_hidden_state_layers())}

    def reads(self, target_model: Any, exposed: set[int]) -> None:
        """exposed: layers whose hidden states the target gives, in their order."""
        mine = self.layers(target_model)
        self._places = [place for place, layer in enumerate(sorted(exposed)) if layer in mine]

    def own_states(self, aux_hidden_states: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Select the states that the member was trained on, each (tokens, width), from all that the target outputs."""
        if aux_hidden_states is None or self._places is None:
            return aux_hidden_states
        return [aux_hidden_states[place] for place in self._places]

    def check_layers(self, draft: Any, target_model: Any) -> None:
        """Raise ValueError if the draft joins the states of more or fewer layers than it reads."""
        width, layers = self.vllm_config.model_config.get_hidden_size(), len(self.layers(target_model))
        joining = getattr(draft.model, "fc", None)  # joins all states into one; not every draft has it
        joined = getattr(joining, "input_size", layers * width)
        if joined != layers * width:
            raise ValueError(
                f"the checkpoint's fusion layer fits {joined / width:g} layers, and its config lists {layers} "
                "(eagle_aux_hidden_state_layer_ids, target_layer_ids)"
            )
