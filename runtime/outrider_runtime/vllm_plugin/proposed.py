"""What members propose, and each request's row of it: on the device, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from outrider_runtime.control.data.batch import NOBODY
from outrider_runtime.loop.confidences import MAX_QUANTA, QUANTA_PER_UNIT, UNKNOWN, Calibration
from outrider_runtime.vllm_plugin.drafting_step import DraftingStep

FILLER = 0
"""A real token: the target's embedding has no row for a padding value, and places for it may be scheduled."""
LEAST_CHANCE = 1e-4
"""The least P(accepted) of a real token: 0 stands for no token."""


class Proposed(NamedTuple):
    """By one member."""

    tokens: torch.Tensor
    """(requests, passes)"""
    counts: torch.Tensor
    """(requests,): how many of a row are some."""
    confidence: torch.Tensor | None
    """(requests, passes), or (requests, 1) for all tokens of a row alike; None: it says nothing."""


def real(tokens: torch.Tensor, member: Any, vocab_size: int, slots: torch.Tensor | None = None) -> Proposed:
    """Of (requests, passes) that `member` made; a row ends before its first value that is no token of the target's.
    slots: (requests,), of the request states."""
    are_tokens = (tokens >= 0) & (tokens < vocab_size)
    counts = are_tokens.to(torch.int8).cumprod(dim=1).sum(dim=1, dtype=torch.int8)
    found = getattr(member, "found", None)
    if found is not None:
        counts = torch.minimum(counts, found[: counts.shape[0]].to(torch.int8))
    return Proposed(tokens, counts, _confidence(member, tokens, slots))


def _confidence(member: Any, tokens: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor | None:
    matched = getattr(member, "matched", None)
    if matched is not None:
        lengths: torch.Tensor = matched[: tokens.shape[0], None]
        return lengths
    log_odds: torch.Tensor | None = getattr(member, "confidence", None)
    if slots is None or log_odds is None or not member.gives_confidence:
        return None
    return log_odds[slots, : tokens.shape[1]]


def assign_proposals(tokens: torch.Tensor, found: Mapping[int, Proposed], step: DraftingStep) -> torch.Tensor:
    """Fills `tokens` (requests, most) by what the step orders; found: by member. What `DraftingStep.end` takes."""
    tokens.fill_(FILLER)
    made = torch.zeros(2 + tokens.shape[1], tokens.shape[0], dtype=torch.int8, device=tokens.device)
    lengths, proposers, confidence = made[0], made[1], made[2:].T
    proposers.fill_(NOBODY)
    confidence.fill_(UNKNOWN)
    for wanted in (step.chosen, step.second):
        wanted_there = async_tensor_h2d(wanted, device=tokens.device)
        for number in (one for one in found if (wanted == one).any()):
            proposals, counts, said = found[number]
            here = (wanted_there == number) & (counts > 0) & (lengths == 0)
            width = proposals.shape[1]
            places = here[:, None] & (torch.arange(width, device=tokens.device) < counts[:, None])
            tokens[:, :width] = torch.where(places, proposals, tokens[:, :width])
            lengths.copy_(torch.where(here, counts, lengths))
            proposers.masked_fill_(here, number)
            if said is not None:
                quanta = (said * QUANTA_PER_UNIT).round().clamp(-MAX_QUANTA, MAX_QUANTA).to(torch.int8)
                confidence[:, :width] = torch.where(places, quanta, confidence[:, :width])
    return made


def acceptance(made: torch.Tensor, calibration: Calibration | None) -> torch.Tensor:
    """(requests, most): P(token accepted, its parent was), by the drafter's own confidence; 0: no proposal. made: as
    `assign_proposals` returns it. calibration: None where nothing is known, and all real ones are alike."""
    lengths, proposers, confidence = made[0], made[1].long(), made[2:].T
    real_ones = torch.arange(confidence.shape[1], device=made.device) < lengths[:, None]
    if calibration is None:
        return real_ones * 0.5
    slopes = async_tensor_h2d(calibration.slopes, device=made.device)[proposers]
    intercepts = async_tensor_h2d(calibration.intercepts, device=made.device)[proposers]
    said = torch.where(confidence == UNKNOWN, 0, confidence) / QUANTA_PER_UNIT
    chances = torch.sigmoid(slopes[:, None] * said + intercepts).clamp(min=LEAST_CHANCE)
    return torch.where(real_ones, chances, 0.0)
