"""Which system runs when. Pure: servers stay up together, and take turns at every point.

Machines drift within minutes. Systems that are measured at the same point one right after the other are compared under
the same conditions, as far as there are any. Where there are more than fit beside each other, the reference is up in
every sitting, and the others are compared with what it did beside them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.evidence.scenario import Acceptance, ComparedScenario

MOST_SERVERS = 5
"""That 24 GiB hold beside each other, at nearly 4 each; an idle one takes no time."""
REPEATS_TOGETHER = 4
"""That a group of servers stays up for: a start takes half a minute."""


@dataclass(frozen=True)
class Round:
    """One repeat of one scenario in one sitting: at each of its points every system takes its turn."""

    repeat: int
    scenario: ComparedScenario
    systems: tuple[str, ...]
    sitting: int = 0
    """Which of the sittings that share this repeat of the scenario."""

    def turns(self, point: int) -> tuple[str, ...]:
        """Who is measured at this point, in order: each time another one begins, and each second time the order is
        turned about, so that nobody always follows the same one."""
        start = (self.repeat + point) % len(self.systems)
        turned = (*self.systems[start:], *self.systems[:start])
        return turned if point % 2 else turned[::-1]


@dataclass(frozen=True)
class Sitting:
    """Servers that are up together, and the rounds that they are measured in."""

    rounds: tuple[Round, ...]
    controlled: bool = False
    """Acceptance is controlled: the engine is another one."""

    @property
    def systems(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for one in self.rounds for name in one.systems))


def sittings(
    scenarios: Sequence[ComparedScenario], order: Sequence[str], references: Sequence[str]
) -> Iterator[Sitting]:
    """All of them. `order` holds the systems' names; of the references, the first that takes part is in every one."""
    for controlled in (False, True):
        mine = [one for one in scenarios if isinstance(one, Acceptance) is controlled]
        names = [name for name in order if any(name in one.systems for one in mine)]
        reference = next((name for name in references if name in names), None)
        for turn, rounds in itertools.groupby(_rounds(mine), key=lambda one: (one.repeat - 1) // REPEATS_TOGETHER):
            together = list(rounds)
            for number, group in enumerate(_groups(names, reference, turn)):
                seated = [_seated(one, group, reference, number) for one in together]
                kept = tuple(one for one in seated if one.systems)
                if kept:
                    yield Sitting(kept, controlled)


def left(planned: Sequence[Sitting], finished: Callable[[Round, str], bool]) -> list[Sitting]:
    """What of the planned sittings is still to be measured."""
    remaining = []
    for sitting in planned:
        rounds = [replace(one, systems=_unfinished(one, finished)) for one in sitting.rounds]
        kept = tuple(one for one in rounds if one.systems)
        if kept:
            remaining.append(replace(sitting, rounds=kept))
    return remaining


def _unfinished(one: Round, finished: Callable[[Round, str], bool]) -> tuple[str, ...]:
    return tuple(name for name in one.systems if not finished(one, name))


def _rounds(scenarios: Sequence[ComparedScenario]) -> Iterator[Round]:
    for repeat in range(1, max((one.repeats for one in scenarios), default=0) + 1):
        for one in scenarios:
            if repeat <= one.repeats:
                yield Round(repeat, one, one.systems)


def _groups(names: Sequence[str], reference: str | None, turn: int) -> list[list[str]]:
    """As few and as even as can be, the reference in each. In each turn they are cut elsewhere, so that others meet."""
    if len(names) <= MOST_SERVERS:
        return [list(names)]
    shared = [] if reference is None else [reference]
    others = [name for name in names if name not in shared]
    most = MOST_SERVERS - len(shared)
    start = turn * (most // 2) % len(others)
    turned = [*others[start:], *others[:start]]
    count = math.ceil(len(others) / most)
    return [shared + turned[len(others) * one // count : len(others) * (one + 1) // count] for one in range(count)]


def _seated(one: Round, group: Sequence[str], reference: str | None, number: int) -> Round:
    """The round's systems that sit here; nobody where that is the reference alone, which has others elsewhere."""
    here = tuple(name for name in group if name in one.systems)
    alone = set(here) == {reference} != set(one.systems)
    return replace(one, systems=() if alone else here, sitting=number)
