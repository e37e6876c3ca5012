"""Proposals of the members, and the assignment of one to each request, on the device and without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from outrider_runtime.control.batch import NO_DRAFTER
from outrider_runtime.loop.confidences import MAX_QUANTA, QUANTA_PER_UNIT, UNKNOWN, Calibration
from outrider_runtime.vllm_plugin.drafting_step import DraftingStep
from outrider_runtime.vllm_plugin.messages import Numbers

FILLER = 0
"""Fills placeholders without a proposal. It must be a real token: the target's embedding has no row for padding."""
MIN_ACCEPTANCE = 1e-4
"""Lower bound of P(accepted) of a real proposal: 0 stands for no proposal."""


class Proposed(NamedTuple):
    """Proposals of one member."""

    tokens: torch.Tensor
    """(requests, passes)"""
    counts: torch.Tensor
    """(requests,): valid tokens at the start of a row."""
    confidence: torch.Tensor | None
    """(requests, passes); None: unknown."""


def real(tokens: torch.Tensor, member: Any, vocab_size: int, slots: torch.Tensor | None = None) -> Proposed:
    """Select the valid proposals of a member.

    A row ends before its first value that is not a token of the target. tokens: (requests, passes). slots: (requests,),
    slots of the request states.
    """
    are_tokens = (tokens >= 0) & (tokens < vocab_size)
    counts = are_tokens.to(torch.int8).cumprod(dim=1).sum(dim=1, dtype=torch.int8)
    follow_up_tokens = getattr(member, "follow_up_tokens", None)
    if follow_up_tokens is not None:
        counts = torch.minimum(counts, follow_up_tokens[: counts.shape[0]].to(torch.int8))
    return Proposed(tokens, counts, _confidence(member, tokens, slots))


def _confidence(member: Any, tokens: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor | None:
    evidence: torch.Tensor | None = getattr(member, "evidence", None)
    if evidence is not None:
        return evidence[: tokens.shape[0], : tokens.shape[1]]
    log_odds: torch.Tensor | None = getattr(member, "confidence", None)
    if slots is None or log_odds is None or not member.gives_confidence:
        return None
    return log_odds[slots, : tokens.shape[1]]


def assign_proposals(tokens: torch.Tensor, by_member: Mapping[int, Proposed], step: DraftingStep) -> torch.Tensor:
    """Fill `tokens` (requests, most tokens) with the proposals that the step orders.

    Of two members' proposals a request gets those of which more tokens are expected to be accepted, and the first
    member's if that is unknown or equal. Returns lengths, drafters and confidences, as `DraftingStep.end` takes them.
    """
    made = _fill(tokens, by_member, step.chosen)
    if (step.second == NO_DRAFTER).all():
        return made
    second_tokens = torch.empty_like(tokens)
    second = _fill(second_tokens, by_member, step.second)
    calibration = step.order.calibration
    is_better = _expected_tokens(second, calibration) > _expected_tokens(made, calibration)
    tokens.copy_(torch.where(is_better[:, None], second_tokens, tokens))
    return torch.where(is_better, second, made)


def _fill(tokens: torch.Tensor, by_member: Mapping[int, Proposed], drafters: Numbers) -> torch.Tensor:
    """Fill `tokens` with the proposals of each request's drafter. drafters: (requests,)."""
    tokens.fill_(FILLER)
    made = torch.zeros(2 + tokens.shape[1], tokens.shape[0], dtype=torch.int8, device=tokens.device)
    lengths, proposers, confidence = made[0], made[1], made[2:].T
    proposers.fill_(NO_DRAFTER)
    confidence.fill_(UNKNOWN)
    drafter_on_device = async_tensor_h2d(drafters, device=tokens.device)
    for number in (member for member in by_member if (drafters == member).any()):
        proposals, counts, member_confidence = by_member[number]
        rows = (drafter_on_device == number) & (counts > 0)
        width = proposals.shape[1]
        valid = rows[:, None] & (torch.arange(width, device=tokens.device) < counts[:, None])
        tokens[:, :width] = torch.where(valid, proposals, tokens[:, :width])
        lengths.copy_(torch.where(rows, counts, lengths))
        proposers.masked_fill_(rows, number)
        if member_confidence is not None:
            quanta = (member_confidence * QUANTA_PER_UNIT).round().clamp(-MAX_QUANTA, MAX_QUANTA).to(torch.int8)
            confidence[:, :width] = torch.where(valid, quanta, confidence[:, :width])
    return made


def _expected_tokens(made: torch.Tensor, calibration: Calibration | None) -> torch.Tensor:
    """(requests,): expected accepted tokens of their proposals; without a calibration, 1 for any proposal.

    made: the result of `_fill`.
    """
    if calibration is None:
        return (made[0] > 0).float()
    return acceptance(made, calibration).cumprod(dim=1).sum(dim=1)


def acceptance(made: torch.Tensor, calibration: Calibration | None) -> torch.Tensor:
    """(requests, most tokens): P(token accepted | its parent was), from the drafter's confidence; 0: no proposal.

    made: the result of `assign_proposals`. calibration: None if unknown; then all real proposals get the same value.
    """
    lengths, proposers, confidence = made[0], made[1].long(), made[2:].T
    is_real = torch.arange(confidence.shape[1], device=made.device) < lengths[:, None]
    if calibration is None:
        return is_real * 0.5
    slopes = async_tensor_h2d(calibration.slopes, device=made.device)[proposers]
    intercepts = async_tensor_h2d(calibration.intercepts, device=made.device)[proposers]
    values = torch.where(confidence == UNKNOWN, 0, confidence) / QUANTA_PER_UNIT
    chances = torch.sigmoid(slopes[:, None] * values + intercepts).clamp(min=MIN_ACCEPTANCE)
    return torch.where(is_real, chances, 0.0)
