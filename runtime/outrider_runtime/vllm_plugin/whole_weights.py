"""Refuses a drafter whose checkpoint lacks weights, which vLLM would leave uninitialised, or has some not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outrider_runtime.finite_weights import refuse_not_finite
from outrider_runtime.vllm_plugin import patches

NOTHING: dict[str, str] = {}
FROM_TARGET = {"embed_tokens": "has_own_embed_tokens", "lm_head": "has_own_lm_head"}
"""Weights that a head may share with its target, with vLLM's attribute of a head that has its own."""
TOKEN_MAP = "draft_id_to_target_id"
"""vLLM's name for d2t: offset from each token of a head's smaller vocabulary to the target's token."""
PLACEHOLDERS = (".q_zero_point", ".k_zero_point", ".v_zero_point")
"""vLLM makes them for attention of compressed-tensors models, and never reads them."""
NO_OFFSET = torch.iinfo(torch.int64).min
MARKS = {
    torch.float32: (torch.int32, 0x7FD5A5A5),
    torch.float16: (torch.int16, 0x7EA5),
    torch.bfloat16: (torch.int16, 0x7FD5),
    torch.int64: (torch.int64, NO_OFFSET),
}
"""Integer type and bits that mark a number as not loaded, by format: NaNs that no calculation makes."""


@contextmanager
def whole_weights(load_format: str, shared: Mapping[str, str] = NOTHING) -> Iterator[None]:
    """Check that models loaded in this context find all their weights. Raises ValueError, which names missing ones.

    load_format: vLLM's; `dummy` weights are in no checkpoint. shared: weights that may be missing, see `FROM_TARGET`.
    """
    if load_format == "dummy":
        yield
        return
    make, process = patches.original(patches.NEW_MODEL), patches.original(patches.LOADED_MODEL)

    def made(*arguments: Any, **keywords: Any) -> Any:
        model = make(*arguments, **keywords)
        for weight in _to_be_loaded(model, shared).values():
            kind, bits = MARKS[weight.dtype]
            weight.data.view(kind).fill_(bits)
        return model

    def processed(model: nn.Module, *arguments: Any, **keywords: Any) -> None:
        weights = _to_be_loaded(model, shared)
        missing = [name for name, weight in weights.items() if _is_missing(weight)]
        if missing:
            raise ValueError(f"its checkpoint lacks weights of {', '.join(missing)}; save or download it again, whole")
        refuse_not_finite(weights)
        process(model, *arguments, **keywords)

    with patches.in_place(patches.NEW_MODEL, made), patches.in_place(patches.LOADED_MODEL, processed):
        yield


def _is_missing(weight: torch.Tensor) -> bool:
    kind, bits = MARKS[weight.dtype]
    return bool((weight.data.view(kind) == bits).any())


def _to_be_loaded(model: nn.Module, shared: Mapping[str, str]) -> dict[str, nn.Parameter]:
    """Return the weights that a checkpoint must have.

    It may lack weights shared with the target, scalars (scales), weights other than norms that are all 1 at the start,
    and `PLACEHOLDERS`.
    """
    has_map = getattr(model, TOKEN_MAP, None) is not None  # its output layer is smaller than the target's, too
    taken = [name for name, brings_own in shared.items() if not getattr(model, brings_own, False)]
    taken = [name for name in taken if not (has_map and name == "lm_head")]
    return {
        name: weight
        for name, weight in model.named_parameters()
        if weight.dtype in MARKS
        and weight.dim()
        and not weight.is_meta
        and not name.endswith(PLACEHOLDERS)
        and not any(part in name for part in taken)
        and ("norm" in name or not bool((weight == 1).all()))
    }


def check_token_map(head: nn.Module, vocabulary: int) -> None:
    """Raise ValueError if a head may propose tokens that the target lacks. vocabulary: the target's tokens.

    Such tokens would make it read and write behind its tables, which ends the engine on a GPU.
    """
    offsets = getattr(head, TOKEN_MAP, None)
    if offsets is None:
        return
    tokens = torch.arange(len(offsets), device=offsets.device) + offsets
    beyond = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(beyond):
        token = int(beyond[0])
        raise ValueError(f"its token map (d2t) names token {token}, the target has {vocabulary}; save it again, whole")
