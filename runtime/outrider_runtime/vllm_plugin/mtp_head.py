"""The MTP layer of the target's own checkpoint as a member of the pool.

It takes one pass for each token, like an EAGLE head, but reads the target's last hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from outrider_runtime.vllm_plugin.confident import Confident
from outrider_runtime.vllm_plugin.eagle_head import FirstPass
from outrider_runtime.vllm_plugin.layer_names import named
from outrider_runtime.vllm_plugin.patches import HEAD_LOADER
from outrider_runtime.vllm_plugin.whole_weights import FROM_TARGET, whole_weights


class MTPHead(Confident, FirstPass, MTPSpeculator):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(self, vllm_config: Any, device: torch.device, prefix: str | None) -> None:
        """prefix: see `named`."""
        super().__init__(vllm_config, device)
        self._prefix = prefix

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        with named(HEAD_LOADER, self._prefix), whole_weights(self.vllm_config.load_config.load_format, FROM_TARGET):
            return super().load_draft_model(target_model, target_attn_layer_names)
