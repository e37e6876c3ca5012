"""Keeps full garbage collections short: each stops the event loop, for as long as there are objects to walk.

What is imported and what the cache holds lives long and has no cycles, but is walked each time: a tenth of a second
with a thousand services. Frozen, it is left out, and still freed when the last reference to it goes.
"""

from __future__ import annotations

import asyncio
import gc

MOST_WALKED = 30_000
"""Long-lived objects from which on they are frozen: some 30 ms to walk."""
LOOK_EVERY_S = 5.0
THAW_EVERY_S = 3600.0
"""What was under way when it was frozen, and goes in a circle later, is garbage that is collected then."""


async def run() -> None:
    """Freeze what has gathered, until cancelled."""
    clock = asyncio.get_running_loop().time
    thawed_at = clock()
    while True:
        if clock() - thawed_at >= THAW_EVERY_S:
            gc.unfreeze()
            thawed_at = clock()
        settle()
        await asyncio.sleep(LOOK_EVERY_S)


def settle() -> None:
    """Collect, so that no garbage is kept for ever, then freeze the rest, where that has become much."""
    if len(gc.get_objects(generation=2)) > MOST_WALKED:
        gc.collect()
        gc.freeze()
