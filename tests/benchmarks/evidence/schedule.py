"""Which system runs when. Pure: every repeat starts with another system, and a start serves all of its scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.benchmarks.evidence.scenario import Acceptance, ComparedScenario


@dataclass(frozen=True)
class Sitting:
    """One start of one system, and what is measured in it."""

    repeat: int
    system: str
    scenarios: tuple[ComparedScenario, ...]
    controlled: bool = False
    """Acceptance is controlled: the engine is another one."""


def sittings(
    scenarios: Sequence[ComparedScenario],
    order: Sequence[str],
    finished: Callable[[ComparedScenario, int, str], bool],
) -> Iterator[Sitting]:
    """What is left to run, repeat by repeat; `order` holds the systems' names."""
    for repeat in range(1, max((one.repeats for one in scenarios), default=0) + 1):
        for controlled in (False, True):
            mine = [one for one in scenarios if isinstance(one, Acceptance) is controlled and one.repeats >= repeat]
            for system in _rotated([name for name in order if any(name in one.systems for one in mine)], repeat):
                left = tuple(one for one in mine if system in one.systems and not finished(one, repeat, system))
                if left:
                    yield Sitting(repeat, system, left, controlled)


def _rotated(names: Sequence[str], repeat: int) -> list[str]:
    """A third of the way on in each repeat: neighbours change, too, in contrast to a turn by one."""
    if not names:
        return []
    start = (repeat - 1) * max(1, len(names) // 3) % len(names)
    turned = [*names[start:], *names[:start]]
    return turned if repeat % 2 else turned[::-1]
