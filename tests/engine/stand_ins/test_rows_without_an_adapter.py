"""A request without a LoRA adapter gets none, whatever its batch holds."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
FED, MADE, RANK, ADAPTERS = 12, 10, 4, 3


@pytest.mark.parametrize("padding", [0, 2], ids=["linear layer", "one part of a packed layer"])
def test_adapter_changes_only_the_rows_that_use_it(padding: int) -> None:
    """Bug: -1, for none, indexes weights from behind: such rows got the adapter in the last slot."""
    import outrider_cpu

    outrider_cpu.install()
    from vllm.lora.punica_wrapper import punica_cpu

    random = torch.Generator().manual_seed(0)
    fed, made = torch.randn(5, FED, generator=random), torch.randn(5, MADE + padding, generator=random)
    down = torch.randn(ADAPTERS, 1, RANK, FED, generator=random)
    up = torch.randn(ADAPTERS, 1, MADE, RANK, generator=random)
    which = torch.tensor([-1, 0, 2, -1, 1])
    expected = made.clone()
    for row in (1, 2, 4):
        expected[row, padding:] += 2.0 * up[which[row], 0] @ down[which[row], 0] @ fed[row]
    between = torch.full((5, RANK), torch.nan)
    punica_cpu.bgmv_shrink(fed, down, between, which, 2.0)
    if padding:
        punica_cpu.bgmv_expand_slice(between, up, made, which, padding, MADE, True)
    else:
        punica_cpu.bgmv_expand(between, up, made, which, True)
    torch.testing.assert_close(made, expected)


def test_so_it_is_where_tokens_come_by_request() -> None:
    """The products are those of prefill; a second installation changes nothing."""
    import outrider_cpu

    outrider_cpu.install()
    outrider_cpu.install()
    from vllm.lora.punica_wrapper import punica_cpu

    fed, down = torch.ones(4, FED), torch.ones(ADAPTERS, 1, RANK, FED)
    between = torch.zeros(4, RANK)
    starts, lengths, which = torch.tensor([0, 3]), torch.tensor([3, 1]), torch.tensor([-1, 1])
    punica_cpu.sgmv_shrink(fed, down, between, starts, lengths, which, 2, 3, 4, 1.0)
    assert between.tolist() == [[0.0] * RANK] * 3 + [[FED] * RANK]
