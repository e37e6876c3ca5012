"""The order in which waiting requests are admitted, and the priority of decoding in a step with a lowered budget.

Waiting requests are admitted by earliest deadline: arrival plus the patience of the class. So a tight class goes before
a loose one that arrived a little earlier, and no request starves: one that arrives late enough is due later, whatever
its class. Within a class it is first come, first served. No engine is imported here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from outrider_runtime.control.settings import SLOClass

PATIENCE_TOKENS = 100
"""Patience of a class without a TTFT, in units of its TPOT."""
PATIENCE_SHARE = 0.25
"""Patience of a class with a TTFT, as a share of it: the rest is left for the prefill."""
Item = TypeVar("Item")


def patience_s(slo_class: SLOClass) -> float:
    """Return how long a request of this class may wait before it is late."""
    if slo_class.ttft_s is None:
        return PATIENCE_TOKENS * slo_class.tpot_s
    return PATIENCE_SHARE * slo_class.ttft_s


def patience_used(now_s: float, prompts: Iterable[tuple[float, float]]) -> float:
    """Return the largest share of its patience that a prompt has used; 0 without prompts. prompts: (arrived, due)."""
    return max(((now_s - arrived_at) / max(due_at - arrived_at, 1e-9) for arrived_at, due_at in prompts), default=0.0)


def place_last(queue: deque[Item], due: Callable[[Item], float]) -> None:
    """Move the last item of `queue` before those that are due after it.

    Items with a `due` of minus infinity stay in front: preempted requests, whose users are reading already.
    """
    item = queue.pop()
    deadline, position = due(item), len(queue)
    while position > 0 and due(queue[position - 1]) > deadline:
        position -= 1
    queue.insert(position, item)


def decoding_first(running: list[Item], decodes: Callable[[Item], bool]) -> list[Item]:
    """Sort decoding requests to the front, so that a lowered token budget cuts prefill only."""
    return [item for item in running if decodes(item)] + [item for item in running if not decodes(item)]
