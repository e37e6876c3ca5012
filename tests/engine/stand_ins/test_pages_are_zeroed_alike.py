"""New pages of a target with layers that keep a state are zeroed as vLLM's kernel does it."""

from __future__ import annotations

import os
from typing import Any

import outrider_cpu
import pytest
import torch

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
PAGES, WIDTH = 5, 40


def test_new_pages_are_zeroed_and_others_kept() -> None:
    """Layers of two sizes; a page of the first one has a tail that belongs to another layer."""
    os.environ.update(outrider_cpu.ENVIRONMENT)
    outrider_cpu.install()
    from outrider_cpu import zeroed_pages
    from vllm.v1.worker.utils import KVBlockZeroer

    def zeroed(method: Any) -> list[torch.Tensor]:
        layers = [torch.ones(PAGES, WIDTH), torch.ones(PAGES, 2 * WIDTH)]
        zeroer = KVBlockZeroer.__new__(KVBlockZeroer)
        zeroer.device = torch.device("cpu")
        addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
        strides, sizes = torch.tensor([WIDTH, 2 * WIDTH]), torch.tensor([WIDTH - 7, 2 * WIDTH])
        zeroer._meta = (addresses, strides, sizes, 2, 64, 2)
        method(zeroer, [1, 4])
        method(zeroer, [])
        return layers

    assert KVBlockZeroer.zero_block_ids is zeroed_pages.zero_block_ids
    ours, theirs = zeroed(zeroed_pages.zero_block_ids), zeroed(zeroed_pages.interpreted_zero_block_ids)
    assert all(map(torch.equal, ours, theirs))
    assert [layer.sum(1).tolist() for layer in ours] == [[40, 7, 40, 40, 7], [80, 0, 80, 80, 0]]
