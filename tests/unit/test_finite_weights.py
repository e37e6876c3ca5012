"""Weights and hidden states that are not finite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from outrider_runtime.finite_weights import (
    broken_requests,
    not_finite,
    overflows,
    refuse_broken_target,
    refuse_not_finite,
    state_sums,
)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([1.0, torch.nan, torch.inf], "NaN"),
        ([1.0, -torch.inf], "infinite numbers (in float32)"),
        ([3e38, -3e38, 0.0], ""),
        ([], ""),
    ],
)
def test_numbers_that_are_not_finite_are_named(numbers: list[float], said: str) -> None:
    assert not_finite(torch.tensor(numbers)) == said


def test_number_that_overflows_in_the_engines_format_is_named() -> None:
    """70,000 is a number of the checkpoint, and infinity once it is converted."""
    assert not_finite(torch.tensor([70_000.0])) == ""
    assert not_finite(torch.tensor([70_000.0]).half()) == "infinite numbers (in float16)"


def test_first_weight_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match=r"^its b has NaN: train, save or download it again$"):
        refuse_not_finite({"a": torch.ones(2), "b": torch.tensor([torch.nan])})


def test_target_is_refused_by_its_weights_alone() -> None:
    """Quantised layers have parameters that no checkpoint holds, with whatever lies in memory."""
    layer = torch.nn.Linear(2, 2)
    layer.q_zero_point = torch.nn.Parameter(torch.tensor([torch.nan]))
    target = torch.nn.Sequential(layer)
    refuse_broken_target(target)
    layer.bias.data[1] = torch.nan
    with pytest.raises(ValueError, match=r"the target cannot be served: its 0\.bias has NaN"):
        refuse_broken_target(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_request_is_broken_if_its_next_tokens_state_is(dtype: torch.dtype) -> None:
    """Two requests with a proposal each: rows after the first are of proposals, which may be anything."""
    states = torch.full((6, 512), 200.0, dtype=dtype)  # its sum is infinite in float16
    states[1, 7], states[4, 0], states[5, 3] = torch.inf, torch.nan, torch.nan
    batch = SimpleNamespace(
        num_reqs=3, logits_indices=torch.tensor([0, 1, 2, 3, 4]),
        cu_num_logits=torch.tensor([0, 2, 4, 5, 0], dtype=torch.int32),
    )  # fmt: skip
    assert broken_requests(["a", "b", "c"], state_sums(states, batch)) == ["c"]
    states[2, 1] = -torch.inf
    assert broken_requests(["a", "b", "c"], state_sums(states, batch)) == ["b", "c"]


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_overflow_counts_in_rows_that_a_token_came_from(number: float) -> None:
    """Bug: only each request's first row of logits was looked at, and an overflow at a verified token was answered.
    Requests of two tokens, of one token behind two rejected proposals, and in the midst of a prompt."""
    first, sampled = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([2, 1, 0], dtype=torch.int32)
    broken = {
        row: overflows(torch.zeros(7).index_fill(0, torch.tensor([row]), number), first, sampled).tolist()
        for row in range(7)
    }
    first_only, second_only, none = [True, False, False], [False, True, False], [False] * 3
    assert broken == {0: first_only, 1: first_only, 2: none, 3: second_only, 4: none, 5: none, 6: none}
