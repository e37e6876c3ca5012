"""Draws follow the distribution, and hang on nothing but seed, place and token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops, TokenHistory
from outrider_runtime.torch_engine.seeded_noise import gumbel
from outrider_runtime.torch_engine.token_sampling import Row, draw, logprobs_of, row_of, weights_of

from tests.unit.torch_engine.engines import Letters

CPU = torch.device("cpu")
DRAWS = 6_000
WORST = 36.1
"""Chi-square of 11 degrees of freedom: p = 1.6e-4."""


def drawn(rows: torch.Tensor, sampling: list[Row]) -> list[int]:
    return draw(weights_of(rows, sampling), sampling)


def history(prompt: list[int], answer: list[int]) -> TokenHistory:
    own = TokenHistory()
    own.catch_up(prompt + answer, len(prompt))
    return own


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 1.5


def chi_square(rows: torch.Tensor, sampling: list[Row], wanted: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(drawn(rows, sampling)), minlength=12).double()
    expected = wanted.double() * len(sampling)
    assert not counts[expected == 0].any()
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("along", ["places", "seeds"])
def test_tokens_come_as_often_as_the_model_says(along: str) -> None:
    """One seed along places, and one place along seeds."""
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
def test_what_is_left_out_never_comes_and_the_others_as_often_as_before(sampling: Sampling, kept: int | None) -> None:
    probabilities = logits().softmax(-1)
    ordered = probabilities.sort(descending=True)
    if sampling.top_p < 1:
        kept = int((ordered.values.cumsum(0) - ordered.values < sampling.top_p).sum())
    elif sampling.min_p:
        kept = int((probabilities >= sampling.min_p * probabilities.max()).sum())
    assert kept is not None
    wanted = torch.zeros(12).scatter_(0, ordered.indices[:kept], ordered.values[:kept])
    rows = [Row(sampling, number) for number in range(DRAWS)]
    assert chi_square(logits().expand(DRAWS, -1), rows, wanted / wanted.sum()) < WORST


def test_noise_hangs_on_seed_place_and_token_alone() -> None:
    noise = gumbel([7], [3], 1000, CPU)[0]
    assert torch.equal(noise[:10], gumbel([7], [3], 10, CPU)[0])
    for other in gumbel([8, 7, 7 + 2**63], [3, 4, 3], 1000, CPU):
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 0.15
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.577, abs=0.15)


def test_a_draw_is_the_same_whoever_shares_the_pass() -> None:
    rows = [Row(Sampling(seed=seed, temperature=1.3, top_p=0.9), 40 + seed) for seed in range(20)]
    several = torch.stack([logits(seed) for seed in range(20)])
    assert drawn(several, rows) == [drawn(several[n : n + 1], rows[n : n + 1])[0] for n in range(20)]
    before = several.clone()
    drawn(several, [row._replace(sampling=Sampling(logit_bias={1: 5.0})) for row in rows])
    assert torch.equal(several, before)


def test_penalties_are_those_of_vllm() -> None:
    """Repetition counts the prompt, the others the answer alone; repetition divides what is positive."""
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
def test_biases_come_before_penalties_as_in_vllm(
    prompt: list[int], answer: list[int], ahead: list[int], penalty: float, frequency: float, presence: float,
    bias: dict[int, float],
) -> None:  # fmt: skip
    """Bug: a bias was added after the repetition penalty, which vLLM applies to the biased logit
    (`Sampler.apply_logits_processors`). A proposal on the way counts like the answer's tokens."""
    wanted, own = logits().double(), [*answer, *ahead]
    for token in range(12):
        wanted[token] += bias.get(token, 0.0)
        if token in (*prompt, *own):
            wanted[token] *= 1 / penalty if wanted[token] > 0 else penalty
        wanted[token] -= frequency * own.count(token) + presence * (token in own)
    sampling = Sampling(
        temperature=0.0, repetition_penalty=penalty, frequency_penalty=frequency, presence_penalty=presence,
        logit_bias=bias,
    )  # fmt: skip
    row = Row(sampling, 0, history=history(prompt, answer), ahead=ahead)
    assert weights_of(logits()[None].double(), [row])[0].tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


class Counted(list[int]):
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.read += len(self)
        return super().__iter__()


def test_a_long_prompt_is_read_once_for_its_penalties() -> None:
    """Bug: every node of every step copied and sorted the prompt: 18 ms of a step of 17 nodes behind 4,000 tokens."""
    tokens = Counted([5, 6] * 2000)
    one = Request("r", tokens, 4000, Stops(9), Sampling(repetition_penalty=1.5), Letters())
    for _ in range(3):
        rows = [row_of(one, ahead) for ahead in ([], [7], [7, 8])]
        weights_of(logits().expand(3, -1), rows)
        tokens.append(9)
    assert tokens.read <= 4000 + 2 * 2
    assert list(one.history.distinct) == [5, 6, 9]
    assert one.history.counts == {9: 2}


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    """Bug: a model with a vocabulary of fewer than 20 tokens died of `top_logprobs: 20`."""
    assert sorted(logprobs_of(logits(), 3, 20).top) == list(range(12))


def test_biases_add_to_the_logits_of_their_tokens_alone() -> None:
    """As many as a request may send, and in a row that stays as it was."""
    before = logits()[None].clone()
    biased = weights_of(before, [Row(Sampling(temperature=0.0, logit_bias={3: 100.0, 0: -2.5}), 0)])
    wanted = logits()
    wanted[3] += 100
    wanted[0] -= 2.5
    assert torch.equal(biased[0], wanted)
    assert torch.equal(before[0], logits())
