"""A control loop without an engine, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider_crds.draft_pool import DrafterSpec
from outrider_runtime.loop.control_loop import ControlLoop
from outrider_runtime.loop.coverage import BlockIds
from outrider_runtime.loop.stepper import Stepper

from tests.engine.engines import boot_config, hot_config

BLOCK = 4


def control_loop(pool: Sequence[DrafterSpec], *, max_requests: int = 4, **settings: Any) -> ControlLoop:
    return ControlLoop(boot_config(pool), hot_config(), pool, max_requests=max_requests, **settings)


def stepper(loop: ControlLoop, *, reports_drafting: bool = True, now_s: float = 0.0, block_ids: Any = None) -> Stepper:
    """reports_drafting: whether the engine reports on drafting."""
    ids: BlockIds = block_ids or (lambda _name, _first, _last: [])
    return Stepper(
        loop,
        block_size=BLOCK,
        block_ids=lambda _drafter, *blocks: ids(*blocks),
        reports_drafting=reports_drafting,
        now_s=now_s,
    )
