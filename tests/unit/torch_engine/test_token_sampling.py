"""Draws follow the distribution, and depend on nothing but seed, place and token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops, TokenHistory
from outrider_runtime.torch_engine.seeded_noise import gumbel
from outrider_runtime.torch_engine.token_sampling import Row, compute_weights, describe_draw, draw, report_logprobs

from tests.unit.torch_engine.engines import Letters

CPU = torch.device("cpu")
DRAWS = 6_000
WORST = 36.1
"""Chi-square of 11 degrees of freedom: p = 1.6e-4."""


def drawn(rows: torch.Tensor, sampling: list[Row]) -> list[int]:
    return draw(compute_weights(rows, sampling), sampling)


def history(prompt: list[int], answer: list[int]) -> TokenHistory:
    own = TokenHistory()
    own.catch_up(prompt + answer, len(prompt))
    return own


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 1.5


def chi_square(rows: torch.Tensor, sampling: list[Row], probabilities: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(drawn(rows, sampling)), minlength=12).double()
    expected = probabilities.double() * len(sampling)
    assert not counts[expected == 0].any()
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("along", ["places", "seeds"])
def test_draws_follow_the_models_probabilities(along: str) -> None:
    """Holds for one seed at many places, and for many seeds at one place."""
    rows = [
        Row(Sampling(seed=number if along == "seeds" else 5, temperature=0.8), 3 if along == "seeds" else number)
        for number in range(DRAWS)
    ]
    assert chi_square(logits().expand(DRAWS, -1), rows, (logits() / 0.8).softmax(-1)) < WORST


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=3), 3),
        (Sampling(top_p=0.7), None),
        (Sampling(min_p=0.2), None),
    ],
)
def test_truncation_renormalises_remaining_tokens(sampling: Sampling, kept: int | None) -> None:
    probabilities = logits().softmax(-1)
    ordered = probabilities.sort(descending=True)
    if sampling.top_p < 1:
        kept = int((ordered.values.cumsum(0) - ordered.values < sampling.top_p).sum())
    elif sampling.min_p:
        kept = int((probabilities >= sampling.min_p * probabilities.max()).sum())
    assert kept is not None
    expected = torch.zeros(12).scatter_(0, ordered.indices[:kept], ordered.values[:kept])
    rows = [Row(sampling, number) for number in range(DRAWS)]
    assert chi_square(logits().expand(DRAWS, -1), rows, expected / expected.sum()) < WORST


def test_noise_depends_on_seed_place_and_token_only() -> None:
    noise = gumbel([7], [3], 1000, CPU)[0]
    assert torch.equal(noise[:10], gumbel([7], [3], 10, CPU)[0])
    for other in gumbel([8, 7, 7 + 2**63], [3, 4, 3], 1000, CPU):
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 0.15
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.577, abs=0.15)


def test_draw_does_not_depend_on_other_rows() -> None:
    rows = [Row(Sampling(seed=seed, temperature=1.3, top_p=0.9), 40 + seed) for seed in range(20)]
    several = torch.stack([logits(seed) for seed in range(20)])
    assert drawn(several, rows) == [drawn(several[n : n + 1], rows[n : n + 1])[0] for n in range(20)]
    before = several.clone()
    drawn(several, [row._replace(sampling=Sampling(logit_bias={1: 5.0})) for row in rows])
    assert torch.equal(several, before)


def test_penalties_equal_vllms() -> None:
    """The repetition penalty counts the prompt, the others only the answer; it divides positive logits."""
    row = Row(Sampling(temperature=0.0, repetition_penalty=2.0), 4, history=history([0], [1]))
    assert drawn(torch.tensor([[4.0, 3.0, 1.9]]), [row]) == [0]
    assert drawn(torch.tensor([[4.0, 3.0, 2.1]]), [row]) == [2]
    assert drawn(torch.tensor([[-1.0, -2.0, -1.5]]), [row]) == [2]
    own = Sampling(temperature=0.0, frequency_penalty=0.5, presence_penalty=1.0)
    row = Row(own, 4, history=history([0], [1, 1]))
    assert drawn(torch.tensor([[2.0, 3.9, 0.0]]), [row]) == [0]
    assert drawn(torch.tensor([[1.8, 3.9, 0.0]]), [row]) == [1]


TOKENS = st.lists(st.integers(0, 11), max_size=9)
AMOUNTS = st.floats(-2, 2)


@given(
    prompt=TOKENS, answer=TOKENS, ahead=TOKENS, penalty=st.floats(0.25, 2), frequency=AMOUNTS, presence=AMOUNTS,
    bias=st.dictionaries(st.integers(0, 11), AMOUNTS),
)  # fmt: skip
def test_biases_are_applied_before_penalties(
    prompt: list[int], answer: list[int], ahead: list[int], penalty: float, frequency: float, presence: float,
    bias: dict[int, float],
) -> None:  # fmt: skip
    """Bug: a bias was added after the repetition penalty, which vLLM applies to the biased logit
    (`Sampler.apply_logits_processors`). A proposed token counts like one of the answer."""
    expected, answer_tokens = logits().double(), [*answer, *ahead]
    for token in range(12):
        expected[token] += bias.get(token, 0.0)
        if token in (*prompt, *answer_tokens):
            expected[token] *= 1 / penalty if expected[token] > 0 else penalty
        expected[token] -= frequency * answer_tokens.count(token) + presence * (token in answer_tokens)
    sampling = Sampling(
        temperature=0.0, repetition_penalty=penalty, frequency_penalty=frequency, presence_penalty=presence,
        logit_bias=bias,
    )  # fmt: skip
    row = Row(sampling, 0, history=history(prompt, answer), ahead=ahead)
    assert compute_weights(logits()[None].double(), [row])[0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


class Counted(list[int]):
    """Tokens that count how often they are read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        items = super().__getitem__(place)
        self.read += len(items) if isinstance(items, list) else 1
        return items

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()


def test_penalties_count_a_long_prompt_once() -> None:
    """Bug: every node of every step copied and sorted the prompt: 18 ms for a step of 17 nodes after 4,000 tokens."""
    tokens = Counted([5, 6] * 2000)
    request = Request("r", tokens, 4000, Stops(9), Sampling(repetition_penalty=1.5), Letters())
    for _ in range(3):
        rows = [describe_draw(request, ahead) for ahead in ([], [7], [7, 8])]
        compute_weights(logits().expand(3, -1), rows)
        tokens.append(9)
    assert tokens.read <= 4000 + 2 * 2
    assert list(request.history.distinct) == [5, 6, 9]
    assert request.history.counts == {9: 2}


def test_logprobs_beyond_vocabulary_are_all_tokens() -> None:
    """Bug: `top_logprobs: 20` stopped the engine of a model with fewer than 20 tokens."""
    assert sorted(report_logprobs(logits(), 3, 20).top) == list(range(12))


def test_biases_change_their_tokens_only() -> None:
    """The logits passed in stay as they were."""
    before = logits()[None].clone()
    biased = compute_weights(before, [Row(Sampling(temperature=0.0, logit_bias={3: 100.0, 0: -2.5}), 0)])
    expected = logits()
    expected[3] += 100
    expected[0] -= 2.5
    assert torch.equal(biased[0], expected)
    assert torch.equal(before[0], logits())
