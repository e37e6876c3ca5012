"""Keep full garbage collections short by freezing long-lived objects.

A full collection stops the event loop while it walks all objects: a tenth of a second with a thousand services.
Modules and cached objects live long and have no cycles. Frozen objects are not walked, and are still freed when their
last reference goes.
"""

from __future__ import annotations

import asyncio
import gc

MOST_WALKED = 30_000
"""Number of long-lived objects from which they are frozen; walking so many takes some 30 ms."""
LOOK_EVERY_S = 5.0
THAW_EVERY_S = 3600.0
"""Seconds between thaws. An object that was in use when it was frozen may end in a cycle, which is collected then."""


async def run() -> None:
    """Freeze long-lived objects from time to time, until cancelled."""
    clock = asyncio.get_running_loop().time
    thawed_at = clock()
    while True:
        if clock() - thawed_at >= THAW_EVERY_S:
            gc.unfreeze()
            thawed_at = clock()
        settle()
        await asyncio.sleep(LOOK_EVERY_S)


def settle() -> None:
    """If there are many long-lived objects, collect garbage and freeze the rest."""
    if len(gc.get_objects(generation=2)) > MOST_WALKED:
        gc.collect()
        gc.freeze()
