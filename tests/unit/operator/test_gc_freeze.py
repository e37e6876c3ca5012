"""The garbage collector does not walk a cache of a thousand services, and loses nothing by it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from outrider_operator.controller import gc_freeze

pytestmark = pytest.mark.slow  # each walks all that the process holds, torch included


class Kept:
    """Something that a cache holds."""

    def __init__(self) -> None:
        self.itself: Kept | None = None


@pytest.fixture(autouse=True)
def _thawed():
    yield
    gc.unfreeze()


def test_what_lives_long_is_not_walked_and_is_freed_all_the_same() -> None:
    cache = [Kept() for _ in range(gc_freeze.MOST_WALKED + 1)]
    gc.collect()
    gc_freeze.settle()
    assert len(gc.get_objects(generation=2)) < 1000
    last = weakref.ref(cache[-1])
    cache.clear()
    assert last() is None


async def test_object_frozen_in_use_is_collected_once_it_is_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was frozen before it ended in a circle stayed for the life of the operator."""
    monkeypatch.setattr(gc_freeze, "THAW_EVERY_S", 0.0)
    monkeypatch.setattr(gc_freeze, "LOOK_EVERY_S", 0.0)
    circle = Kept()
    gone = weakref.ref(circle)
    cache = [Kept() for _ in range(gc_freeze.MOST_WALKED + 1)]
    gc.collect()
    gc_freeze.settle()
    circle.itself = circle
    del circle
    running = asyncio.create_task(gc_freeze.run())
    async with asyncio.timeout(60):
        while gone() is not None:
            await asyncio.sleep(0)
    running.cancel()
    assert cache


def test_garbage_is_collected_before() -> None:
    """Frozen garbage would stay for ever."""
    circle = Kept()
    circle.itself = circle
    gone = weakref.ref(circle)
    cache = [Kept() for _ in range(gc_freeze.MOST_WALKED + 1)]
    gc.collect()
    del circle
    gc_freeze.settle()
    assert gone() is None
    assert cache
