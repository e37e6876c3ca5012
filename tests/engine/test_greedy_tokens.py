"""The short ways to greedy tokens, in verification and in drafts, find what vLLM finds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

VOCABULARY = 6


@pytest.fixture(scope="module")
def vllm_sampler() -> Any:
    """vLLM's, with its CPU kernels."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    return RejectionSampler(Sampler())


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], torch.Tensor]:
    """Proposals of each request, one at least, and logits with ties for them and the tokens behind them."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any))
    proposals = [draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=n, max_size=n)) for n in lengths]
    rows = sum(lengths) + len(lengths)
    values = draw(st.lists(st.integers(0, 3), min_size=rows * VOCABULARY, max_size=rows * VOCABULARY))
    return proposals, torch.tensor(values, dtype=torch.float32).reshape(rows, VOCABULARY)


def metadata_of(proposals: list[list[int]]) -> Any:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    metadata = SpecDecodeMetadata.make_dummy(proposals, torch.device("cpu"))
    bonus = metadata.cu_num_sampled_tokens.numpy() - 1
    targets = np.setdiff1d(np.arange(bonus[-1] + 1), bonus).astype(np.int32)
    return dataclasses.replace(
        metadata,
        target_logits_indices=torch.from_numpy(targets),
        bonus_logits_indices=torch.from_numpy(bonus.astype(np.int32)),
    )


def greedy(requests: int, **changes: Any) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.zeros(requests)
    plain = SamplingMetadata(
        temperature=None, all_greedy=True, all_random=False, top_p=None, top_k=None, generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing,
        presence_penalties=nothing, repetition_penalties=nothing, output_token_ids=[[]] * requests,
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@settings(deadline=None)
@given(batch=batches())
def test_tokens_are_those_of_vllms_rejection_sampler(
    vllm_sampler: Any, batch: tuple[list[list[int]], torch.Tensor]
) -> None:
    from outrider_runtime.vllm_plugin.greedy import likeliest, verified

    proposals, logits = batch
    metadata = metadata_of(proposals)
    theirs = vllm_sampler(metadata, None, logits.clone(), greedy(len(proposals))).sampled_token_ids
    ours = verified(likeliest(logits), metadata)
    assert ours.dtype == theirs.dtype
    assert ours.tolist() == theirs.tolist()


@settings(deadline=None)
@given(batch=batches())
@pytest.mark.usefixtures("vllm_sampler")
def test_drafts_find_in_half_precision_what_vllm_finds(batch: tuple[list[list[int]], torch.Tensor]) -> None:
    from outrider_runtime.vllm_plugin.greedy import likeliest

    logits = batch[1].to(torch.bfloat16)
    assert likeliest(logits).tolist() == logits.argmax(dim=-1).tolist()


def test_whatever_reshapes_logits_or_asks_for_more_goes_to_vllm() -> None:
    from outrider_runtime.vllm_plugin.greedy import takes_the_largest
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

    class Unknown(MinTokensLogitsProcessor):  # type: ignore[misc]
        """A user's own."""

        def __init__(self) -> None:
            """Without vLLM's state."""

    def with_processors(*processors: Any) -> Any:
        return greedy(1, logitsprocs=LogitsProcessors(processors))

    idle = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    biased = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    biased.biases[0] = {1: 5.0}
    assert takes_the_largest(greedy(1))
    assert takes_the_largest(with_processors(idle))
    assert not takes_the_largest(with_processors(idle, biased))
    assert not takes_the_largest(with_processors(Unknown()))
    for change in (
        {"all_greedy": False},
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"no_penalties": False},
        {"allowed_token_ids_mask": torch.zeros(1, VOCABULARY, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[1]]}},
    ):
        assert not takes_the_largest(greedy(1, **change)), change
