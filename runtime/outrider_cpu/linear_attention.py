"""Layers of linear attention that verify draft tokens on a CPU: vLLM's function, for any number of tokens a request.

vLLM keeps the last inputs of a layer's convolution and appends the step's. It takes each step for one of the most
tokens: after a shorter step rejected tokens stay in between, and one that has fewer tokens than were accepted before
raises.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

_forward_of_one_length: Any = gdn_attention._spec_forward


@functools.wraps(_forward_of_one_length)
def forward(
    layer: Any, metadata: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, inputs: torch.Tensor,
    states: torch.Tensor, width: int, state_len: int,
) -> torch.Tensor:  # fmt: skip
    """Compute as vLLM's function. inputs: (slots, channels, state_len), of the convolution; states: (slots, ...)."""
    rows = metadata.num_spec_decodes
    slots, accepted = metadata.spec_state_indices_tensor[:rows], metadata.num_accepted_tokens[:rows]
    first, numbers = slots[:, 0].long(), torch.arange(rows)
    states[first] = states[slots[numbers, accepted.long() - 1].long()]
    begun = [
        inputs[slot, :, count - 1 : count + width - 2].clone()
        for slot, count in zip(first.tolist(), accepted.tolist(), strict=True)
    ]
    for slot, history in zip(first.tolist(), begun, strict=True):
        inputs[slot, :, : width - 1] = history
    afresh = replace(metadata, num_accepted_tokens=torch.ones_like(metadata.num_accepted_tokens))
    out: torch.Tensor = _forward_of_one_length(layer, afresh, mixed_qkv, b, a, inputs, states, width, state_len)
    sizes = metadata.spec_query_start_loc[: rows + 1].diff().tolist()
    for slot, history, tokens in zip(first.tolist(), begun, torch.split(mixed_qkv, sizes), strict=True):
        read = torch.cat([history, tokens.T.to(history.dtype)], dim=1)[:, 1:]  # (channels, width - 2 + tokens)
        inputs[slot, :, : read.shape[1]] = read
    return out
