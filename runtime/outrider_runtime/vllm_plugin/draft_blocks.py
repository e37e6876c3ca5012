"""Physical blocks that hold a draft's KV.

vLLM may put a draft's layers into any of several KV groups, each with blocks of its own. Blocks of one group say
nothing about another's: a prefix hit may bring them from different requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider_runtime.loop.coverage import NOT_KEPT


class DraftBlocks:
    def __init__(self, coordinator: Any, block_size: int, layers: Mapping[str, Iterable[str]]) -> None:
        """coordinator: vLLM's, of the KV groups. block_size: tokens, a multiple of each group's. layers: drafter ->
        names of its attention layers."""
        self._block_size = block_size
        groups = coordinator.kv_cache_config.kv_cache_groups
        pairs = list(zip(groups, coordinator.single_type_managers, strict=True))
        self._managers = {
            drafter: [manager for group, manager in pairs if not {*names}.isdisjoint(group.layer_names)]
            for drafter, names in layers.items()
        }

    def ids(self, drafter: str, request: str, first: int, last: int) -> Sequence[int]:
        """See `loop.coverage.BlockIds`."""
        return [
            block for manager in self._managers.get(drafter, ()) for block in self._of(manager, request, first, last)
        ]

    def _of(self, manager: Any, request: str, first: int, last: int) -> Sequence[int]:
        smaller = self._block_size // manager.block_size
        blocks = manager.req_to_blocks[request][first * smaller : (last + 1) * smaller]
        return [NOT_KEPT if block.is_null else block.block_id for block in blocks]
