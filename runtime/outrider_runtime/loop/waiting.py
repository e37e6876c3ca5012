"""The order in which waiting requests are let in, and what a step with a lowered token budget runs first.

Earliest deadline first: a request's deadline is its arrival plus the patience of its class, so a tight class goes
before a loose one that came a little earlier, and nobody waits for ever: what arrives late enough is due later,
whatever its class. Within a class it is first come, first served. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from outrider_runtime.control.settings import SLOClass

PATIENCE_TOKENS = 100
"""A class without a TTFT waits as long as so many of its tokens take."""
PATIENCE_SHARE = 0.25
"""One with a TTFT waits for this share of it: the prompt is still to be read, perhaps beside others."""
Item = TypeVar("Item")


def patience_s(slo_class: SLOClass) -> float:
    """How long a request of this class may wait before it counts as late."""
    if slo_class.ttft_s is None:
        return PATIENCE_TOKENS * slo_class.tpot_s
    return PATIENCE_SHARE * slo_class.ttft_s


def patience_used(now: float, prompts: Iterable[tuple[float, float]]) -> float:
    """Largest share of its patience that a prompt has used; 0 without any. prompts: (arrived at, due at)."""
    return max(((now - arrived_at) / max(due_at - arrived_at, 1e-9) for arrived_at, due_at in prompts), default=0.0)


def place_last(queue: deque[Item], due: Callable[[Item], float]) -> None:
    """Move the last item of `queue` before those that are due after it. Items with an infinite negative `due` stay
    in front of everybody (preempted ones: their users already read)."""
    item = queue.pop()
    deadline, position = due(item), len(queue)
    while position > 0 and due(queue[position - 1]) > deadline:
        position -= 1
    queue.insert(position, item)


def decoding_first(running: list[Item], decodes: Callable[[Item], bool]) -> list[Item]:
    """`running` with those first that decode, otherwise in its order: a lowered budget cuts prompts alone."""
    return [one for one in running if decodes(one)] + [one for one in running if not decodes(one)]
