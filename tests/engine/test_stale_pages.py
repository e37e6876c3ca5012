"""Why pages of a broken request are zeroed: vLLM's attention on a CPU multiplies what lies behind a request by 0."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
TOKENS, PAGE, HEADS, WIDTH = 5, 32, 2, 64


def attended(stale: float) -> torch.Tensor:
    """Attend over five tokens in a page that holds `stale` everywhere else."""
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    keys, values = (torch.full((2, HEADS, PAGE, WIDTH), stale) for _ in range(2))
    key, value, query = torch.randn(3, TOKENS, HEADS, WIDTH).unbind()
    starts, lengths = torch.tensor([0, TOKENS], dtype=torch.int32), torch.tensor([TOKENS], dtype=torch.int32)
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, PAGE + torch.arange(TOKENS), "vec")
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, HEADS, HEADS, WIDTH, lengths, torch.float32, starts, True, -1, "vec", False
    )
    made, pages = torch.empty_like(query), torch.tensor([[1]], dtype=torch.int32)
    ops.cpu_attention_with_kv_cache(
        query, keys, values, made, starts, lengths, WIDTH**-0.5, True, None, -1, pages, 0.0, plan, None
    )
    return made


def test_nan_behind_a_request_spoils_it_and_numbers_do_not() -> None:
    """Bug: NaN that one request left in a page made every later answer empty. Where this fails, zeroing may go."""
    assert torch.equal(attended(stale=0.0), attended(stale=7.0))
    assert attended(stale=torch.nan).isnan().any()
