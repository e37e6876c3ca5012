"""Sampled answers under speculation are distributed as without: the stand-ins of verification, over many requests."""

from __future__ import annotations

import os

import outrider_cpu
import pytest
import torch

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
REQUESTS, DRAFTED, VOCABULARY, TEMPERATURE = 6000, 2, 8, 0.7
FAR_OUT = 29.9
"""Quantile of chi squared with 7 degrees of freedom: exceeded once in ten thousand times."""


@pytest.mark.parametrize("draws", [True, False], ids=["a drafter that draws", "a drafter that knows one answer"])
def test_tokens_have_the_targets_distribution(draws):
    """Promise: speculation does not change what is sampled (Leviathan et al., 2023, theorem 1)."""
    os.environ.update(outrider_cpu.ENVIRONMENT)
    outrider_cpu.install()
    from outrider_cpu.verification import rejection_sample

    generator = torch.Generator().manual_seed(1)
    first, second, third = (2 * torch.randn(shape, generator=generator) for shape in (8, (8, 8), 8))
    draft = first + torch.randn(VOCABULARY, generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (REQUESTS,), generator=generator)
    proposals = _proposals(draft, seeds) if draws else torch.full((REQUESTS, DRAFTED), int(first.argmax()))
    logits = torch.stack([first.expand(REQUESTS, -1), second[proposals[:, 0]], third.expand(REQUESTS, -1)], 1)
    places = torch.arange(DRAFTED + 1).repeat(REQUESTS)
    tokens, count = rejection_sample(
        logits.view(-1, VOCABULARY) / TEMPERATURE,
        draft.expand(REQUESTS, DRAFTED, -1) if draws else None,
        torch.nn.functional.pad(proposals, (1, 0)).view(-1).int(),
        (DRAFTED + 1) * torch.arange(REQUESTS + 1).int(), 10 + places, torch.arange(REQUESTS),
        torch.arange(REQUESTS).repeat_interleave(DRAFTED + 1), places.int(),
        torch.full((REQUESTS,), TEMPERATURE), seeds, DRAFTED,
    )  # fmt: skip
    assert _chi_squared(tokens[:, 0], first) < FAR_OUT
    likely = int(proposals[:, 0].mode().values)
    went_on = tokens[(count > 1) & (tokens[:, 0] == likely), 1]
    assert len(went_on) > 500
    assert _chi_squared(went_on, second[likely]) < FAR_OUT


def _proposals(draft: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    from outrider_cpu.sampling import gumbel_sample

    everyone, warm = torch.arange(REQUESTS), torch.full((REQUESTS,), TEMPERATURE)
    rows = draft.expand(REQUESTS, -1)
    drawn = [
        gumbel_sample(rows, everyone, warm, seeds, torch.full((REQUESTS,), 10 + place), True, True)
        for place in range(DRAFTED)
    ]
    return torch.stack(drawn, 1)


def _chi_squared(tokens: torch.Tensor, logits: torch.Tensor) -> float:
    expected = len(tokens) * torch.softmax(logits / TEMPERATURE, 0)
    seen = torch.bincount(tokens, minlength=VOCABULARY)
    return float(((seen - expected) ** 2 / expected).sum())


def test_token_sampled_without_proposals_follows_the_target():
    os.environ.update(outrider_cpu.ENVIRONMENT)
    outrider_cpu.install()
    logits = 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2))
    seeds = torch.randint(-(2**62), 2**62, (REQUESTS,), generator=torch.Generator().manual_seed(3))
    assert _chi_squared(_proposals(logits, seeds)[:, 0], logits) < FAR_OUT
