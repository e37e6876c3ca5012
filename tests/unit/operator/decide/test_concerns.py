"""The table of concerns in docs/explanation/operator.md, made from what the concerns read and decide.

Run `python -m tests.unit.operator.decide.test_concerns` to print it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from outrider_operator.cluster_model import Observed
from outrider_operator.decide import CONCERNS
from outrider_operator.decide.desired.desired_state import desired_state
from outrider_operator.decide.desired.profile_store import Profiles
from outrider_operator.decide.desired.service_world import ServiceWorld
from outrider_operator.decide.intent import Intent, intent_of
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.profiling.known_profiles import sources_of
from outrider_operator.kinds import POD

from tests.unit.operator.decide.test_upgrade import PHASES, recorded
from tests.unit.operator.decide.world import SETTINGS, World, manifest

PAGE = Path(__file__).parents[4] / "docs/explanation/operator.md"
HEADER = "| concern | reads | writes | conditions | fields of the status |\n|---|---|---|---|---|\n"
ALWAYS_READ = {"service", "at"}
SOURCES = {
    "workers": "pods",
    "warnings": "pods",
    "provisioning": "pods",
    "job_pods": "jobs",
    "measured_elsewhere": "jobs",
    "prefetch_pods": "prefetch_jobs",
    "prefetch_progress": "prefetch_jobs",
    "groups_access": "children",
    "pool_access": "children",
    "shared_profiles": "profiles",
    "unreachable": "states",
}
"""Field of `Observed` -> the field under which the table lists it."""
OBSERVED = [declared.name for declared in fields(Observed)]


class TracedObserved(Observed):
    """Notes which of its fields are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in OBSERVED:
            super().__getattribute__("__dict__").setdefault("_read", set()).add(name)
        return super().__getattribute__(name)


@dataclass
class Row:
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    conditions: set[str] = field(default_factory=set)
    status: set[str] = field(default_factory=set)

    def text(self, name: str) -> str:
        cells = (", ".join(sorted(cell)) for cell in (self.reads, self.writes, self.conditions, self.status))
        return f"| {name} | {' | '.join(cells)} |\n"


def table() -> str:
    rows: dict[str, Row] = {}
    for observed in _clusters():
        intent = _traced(observed, _intent, rows.setdefault("intent", Row()))
        for concern in CONCERNS:
            row = rows.setdefault(concern.__name__, Row())

            def outcome_of(world: ServiceWorld, concern: Any = concern, intent: Intent = intent) -> ConcernOutcome:
                outcome: ConcernOutcome = concern(world, intent)
                return outcome

            _note(row, _traced(observed, outcome_of, row))
    return HEADER + "".join(row.text(name) for name, row in rows.items())


def _clusters() -> Iterator[Observed]:
    """Clusters in which each concern has something to do."""
    yield World(manifest()).observed()
    yield from (recorded(name).observed() for name in PHASES)
    for spec in ({"gateway": {"inferencePool": True}}, {"modelCache": {"pvc": {"claimName": "cache"}}}):
        world = World(manifest(**spec))
        yield world.observed()
        world.serve() if "gateway" in spec else world.settle()
        yield world.observed()
    world = World(manifest()).served()
    world.patch(speculation={"mode": "Off"})
    world.reconcile()
    yield world.observed()
    world = World(manifest()).settled()
    world.roll_out()
    world.report_states()
    yield world.observed()
    world.settle()
    for job in world.jobs():
        world.measure(job)
    yield world.observed()


def _traced(observed: Observed, function: Callable[[ServiceWorld], Any], row: Row) -> Any:
    traced = TracedObserved(**{name: getattr(observed, name) for name in OBSERVED})
    result = function(ServiceWorld(traced, SETTINGS))
    row.reads |= {SOURCES.get(name, name) for name in vars(traced).get("_read", ()) if name not in ALWAYS_READ}
    return result


def _intent(world: ServiceWorld) -> Intent:
    assert world.spec is not None
    desired = desired_state(world, world.spec)
    shared = Profiles(world.observed.shared_profiles)
    return intent_of(world, desired, sources_of(world.profiles, shared, SETTINGS, desired))


def _note(row: Row, outcome: ConcernOutcome) -> None:
    objects = (*outcome.objects, *outcome.unwanted, *outcome.create, *outcome.apply)
    row.writes |= {str(document["kind"]) for document in objects} | ({POD.kind} if outcome.annotate else set())
    row.conditions |= {str(kind) for kind in outcome.conditions}
    row.status |= set(outcome.status)


def test_table_of_concerns_is_what_they_do() -> None:
    assert table() in PAGE.read_text()


if __name__ == "__main__":
    print(table())
