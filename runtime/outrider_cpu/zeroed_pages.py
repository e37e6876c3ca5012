"""`worker.utils`: zero new pages of a target some of whose layers keep a state."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.utils import KVBlockZeroer

from outrider_cpu.arrays import compiled, row_at, view

Array = Any
interpreted_zero_block_ids: Any = KVBlockZeroer.zero_block_ids


def zero_block_ids(zeroer: Any, block_ids: list[int]) -> None:
    """Zero these pages in each layer that attends, as vLLM's method does."""
    if block_ids and zeroer._meta is not None:
        addresses, strides, sizes, *_ = zeroer._meta
        _zero(view(addresses), view(strides), view(sizes), np.array(block_ids, np.int64))


@compiled
def _zero(addresses: Array, strides: Array, sizes: Array, pages: Array) -> None:
    """strides, sizes: of a page in each layer, in units of 4 bytes."""
    for page in pages:
        for layer in range(len(addresses)):
            row_at(addresses[layer], page, strides[layer])[: sizes[layer]] = 0
