"""What members propose, and each request's row of it: on the device, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from outrider_runtime.control.data.batch import NOBODY
from outrider_runtime.vllm_plugin.drafting_step import DraftingStep

FILLER = 0
"""A real token: the target's embedding has no row for a padding value, and places for it may be scheduled."""


class Proposed(NamedTuple):
    """By one member."""

    tokens: torch.Tensor
    """(requests, passes)"""
    counts: torch.Tensor
    """(requests,): how many of a row are some."""
    matched: torch.Tensor | None
    """(requests,): tokens of the match that they follow; None: it looks nothing up."""


def real(tokens: torch.Tensor, member: Any, vocab_size: int) -> Proposed:
    """Of (requests, passes) that `member` made; a row ends before its first value that is no token of the target's."""
    are_tokens = (tokens >= 0) & (tokens < vocab_size)
    counts = are_tokens.to(torch.int8).cumprod(dim=1).sum(dim=1, dtype=torch.int8)
    found = getattr(member, "found", None)
    if found is not None:
        counts = torch.minimum(counts, found[: counts.shape[0]].to(torch.int8))
    return Proposed(tokens, counts, getattr(member, "matched", None))


def give_each_its_own(tokens: torch.Tensor, found: Mapping[int, Proposed], step: DraftingStep) -> torch.Tensor:
    """Fills `tokens` (requests, most) by what the step orders; found: by member. What `DraftingStep.end` takes."""
    tokens.fill_(FILLER)
    made = torch.zeros(3, tokens.shape[0], dtype=torch.int8, device=tokens.device)
    lengths, proposers, matched = made
    proposers.fill_(NOBODY)
    for wanted in (step.chosen, step.second):
        wanted_there = async_tensor_h2d(wanted, device=tokens.device)
        for number in (one for one in found if (wanted == one).any()):
            proposals, counts, lookup = found[number]
            here = (wanted_there == number) & (counts > 0) & (lengths == 0)
            width = proposals.shape[1]
            places = here[:, None] & (torch.arange(width, device=tokens.device) < counts[:, None])
            tokens[:, :width] = torch.where(places, proposals, tokens[:, :width])
            lengths.copy_(torch.where(here, counts, lengths))
            proposers.masked_fill_(here, number)
            if lookup is not None:
                matched.copy_(torch.where(here, lookup.to(torch.int8), matched))
    return made
