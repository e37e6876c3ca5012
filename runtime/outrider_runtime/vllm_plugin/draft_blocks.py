"""Physical blocks that hold a draft model's KV.

vLLM may put a draft's layers into any of several KV groups, each with blocks of its own. Validity of a block in one
group implies nothing for another group: a prefix hit may take their blocks from different requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider_runtime.loop.coverage import NOT_KEPT


class DraftBlocks:
    def __init__(self, coordinator: Any, block_size: int, layers: Mapping[str, Iterable[str]]) -> None:
        """coordinator: vLLM's coordinator of the KV groups. block_size: tokens, a multiple of each group's block size.

        layers: names of a drafter's attention layers, by drafter.
        """
        self._block_size = block_size
        groups = coordinator.kv_cache_config.kv_cache_groups
        pairs = list(zip(groups, coordinator.single_type_managers, strict=True))
        self._managers = {
            drafter: [manager for group, manager in pairs if not {*names}.isdisjoint(group.layer_names)]
            for drafter, names in layers.items()
        }

    def ids(self, drafter: str, request: str, first: int, last: int) -> Sequence[int]:
        """Return physical blocks, see `loop.coverage.BlockIds`."""
        return [
            block for manager in self._managers.get(drafter, ()) for block in self._of(manager, request, first, last)
        ]

    def _of(self, manager: Any, request: str, first: int, last: int) -> Sequence[int]:
        smaller = self._block_size // manager.block_size
        blocks = manager.req_to_blocks[request][first * smaller : (last + 1) * smaller]
        return [NOT_KEPT if block.is_null else block.block_id for block in blocks]
