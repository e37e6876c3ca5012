"""Which system runs when. Pure: servers stay up together, and take turns at every point.

Machines drift within minutes. Systems that are measured at the same point one right after the other are compared under
the same conditions, as far as there are any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.benchmarks.evidence.scenario import Acceptance, ComparedScenario

MOST_SERVERS = 5
"""That 24 GiB hold beside each other, at nearly 4 each; an idle one takes no time."""
REPEATS_TOGETHER = 4
"""That a group of servers stays up for: a start takes half a minute."""


@dataclass(frozen=True)
class Round:
    """One repeat of one scenario: at each of its points every system takes its turn."""

    repeat: int
    scenario: ComparedScenario
    systems: tuple[str, ...]

    def turns(self, point: int) -> tuple[str, ...]:
        """Who is measured at this point, in order: each time another one begins, and each second time the order is
        turned about, so that nobody always follows the same one."""
        start = (self.repeat + point) % len(self.systems)
        turned = (*self.systems[start:], *self.systems[:start])
        return turned if point % 2 else turned[::-1]


@dataclass(frozen=True)
class Sitting:
    """Servers that are up together, and the rounds that they are measured in."""

    systems: tuple[str, ...]
    rounds: tuple[Round, ...]
    controlled: bool = False
    """Acceptance is controlled: the engine is another one."""


def sittings(
    scenarios: Sequence[ComparedScenario],
    order: Sequence[str],
    finished: Callable[[ComparedScenario, int, str], bool],
) -> Iterator[Sitting]:
    """What is left to run; `order` holds the systems' names. Where there are more than fit beside each other, they are
    grouped anew every few repeats."""
    for controlled in (False, True):
        mine = [one for one in scenarios if isinstance(one, Acceptance) is controlled]
        left = list(_rounds(mine, order, finished))
        names = [name for name in order if any(name in one.systems for one in left)]
        if len(names) <= MOST_SERVERS:
            yield from _sitting(names, left, controlled)
            continue
        for turn, rounds in itertools.groupby(left, key=lambda one: (one.repeat - 1) // REPEATS_TOGETHER):
            together = list(rounds)
            for group in _groups(names, turn):
                yield from _sitting(group, together, controlled)


def _rounds(
    scenarios: Sequence[ComparedScenario], order: Sequence[str], finished: Callable[[ComparedScenario, int, str], bool]
) -> Iterator[Round]:
    for repeat in range(1, max((one.repeats for one in scenarios), default=0) + 1):
        for one in scenarios:
            if repeat <= one.repeats:
                left = [name for name in order if name in one.systems and not finished(one, repeat, name)]
                yield Round(repeat, one, tuple(left))


def _groups(names: Sequence[str], turn: int) -> list[list[str]]:
    """As few and as even as can be. In each turn they are cut elsewhere, so that other systems meet."""
    start = turn * (MOST_SERVERS // 2) % len(names)
    turned = [*names[start:], *names[:start]]
    count = math.ceil(len(names) / MOST_SERVERS)
    return [turned[len(names) * one // count : len(names) * (one + 1) // count] for one in range(count)]


def _sitting(names: Sequence[str], rounds: Sequence[Round], controlled: bool) -> Iterator[Sitting]:
    """That of these systems, if there is anything left for them."""
    theirs = [
        Round(one.repeat, one.scenario, tuple(name for name in one.systems if name in names)) for one in rounds
    ]  # fmt: skip
    kept = tuple(one for one in theirs if one.systems)
    if kept:
        yield Sitting(tuple(names), kept, controlled)
