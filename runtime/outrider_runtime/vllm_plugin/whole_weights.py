"""A head whose checkpoint lacks weights: vLLM leaves them at what lies in memory, and says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from vllm.model_executor.model_loader import base_loader

SHARED = {"embed_tokens": "has_own_embed_tokens", "lm_head": "has_own_lm_head"}
"""What a head may take from its target -> vLLM's word for a head that brings its own."""
CHECKED = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def whole_weights() -> Iterator[None]:
    """What is loaded in here finds all of its weights. Raises ValueError that names those which it does not find."""
    make: Any = vars(base_loader)["initialize_model"]
    process: Any = vars(base_loader)["process_weights_after_loading"]

    def made(*arguments: Any, **keywords: Any) -> Any:
        model = make(*arguments, **keywords)
        for weight in _to_be_loaded(model).values():
            weight.data.fill_(torch.nan)
        return model

    def processed(model: nn.Module, *arguments: Any, **keywords: Any) -> None:
        missing = [name for name, weight in _to_be_loaded(model).items() if bool(weight.isnan().any())]
        if missing:
            raise ValueError(f"its checkpoint lacks weights of {', '.join(missing)}; save or download it again, whole")
        process(model, *arguments, **keywords)

    with mock.patch.multiple(base_loader, initialize_model=made, process_weights_after_loading=processed):
        yield


def _to_be_loaded(model: nn.Module) -> dict[str, nn.Parameter]:
    """All but what it shares with the target, and ones: a norm begins with these, and a checkpoint may leave it so."""
    shared = [name for name, brings_own in SHARED.items() if not getattr(model, brings_own, False)]
    return {
        name: weight
        for name, weight in model.named_parameters()
        if weight.dtype in CHECKED
        and not weight.is_meta
        and not any(one in name for one in shared)
        and not bool((weight == 1).all())
    }
