"""The data files: scenarios and the testbed they run on, and their rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

FOLDER = Path(__file__).parents[1]
ALL_GROUPS = "all"


class FileError(ValueError):
    """A data file that cannot be used; the message names file, field and what is wrong with it."""


class Size(StrEnum):
    """How much of a scenario is run."""

    QUICK = "quick"
    DEFAULT = "default"
    FULL = "full"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Scenario(_Strict):
    scenario: PositiveInt
    title: str


class _Compared(_Scenario):
    """A scenario whose systems take turns, `repeats` times."""

    repeats: PositiveInt
    systems: Annotated[tuple[str, ...], Field(min_length=1)]


Concurrency: TypeAlias = Annotated[dict[PositiveInt, PositiveInt], Field(min_length=1)]
"""Requests at the same time -> how many requests in all."""


class Closed(_Compared):
    kind: Literal["closed"]
    groups: Annotated[tuple[str, ...], Field(min_length=1)]
    concurrency: Concurrency


class Acceptance(_Compared):
    kind: Literal["acceptance"]
    group: str
    acceptance: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Field(min_length=1)]
    concurrency: Concurrency


class RatePhase(_Strict):
    name: str
    of_capacity: PositiveFloat
    seconds: PositiveFloat


class Rates(_Compared):
    kind: Literal["rates"]
    group: str
    phases: Annotated[tuple[RatePhase, ...], Field(min_length=1)]


class DataPhase(_Strict):
    name: str
    group: str
    requests: PositiveInt


class ShiftingData(_Compared):
    kind: Literal["data"]
    concurrency: PositiveInt
    phases: Annotated[tuple[DataPhase, ...], Field(min_length=1)]


class Trace(_Compared):
    kind: Literal["trace"]
    group: str
    of_capacity: PositiveFloat
    seconds: PositiveFloat
    longest_gap_s: PositiveFloat


class SLOShare(_Strict):
    name: str
    share: Annotated[float, Field(gt=0, le=1)]
    step_times: PositiveFloat


class SLOMix(_Compared):
    kind: Literal["slo"]
    group: str
    classes: Annotated[tuple[SLOShare, ...], Field(min_length=1)]
    loads: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    seconds: PositiveFloat


class Cost(_Scenario):
    kind: Literal["cost"]
    benchmarks: Annotated[tuple[str, ...], Field(min_length=1)]


ComparedScenario: TypeAlias = Closed | Acceptance | Rates | ShiftingData | Trace | SLOMix
Scenario: TypeAlias = ComparedScenario | Cost
_SCENARIO: TypeAdapter[Scenario] = TypeAdapter(Annotated[Scenario, Field(discriminator="kind")])


class SystemKind(StrEnum):
    STOCK = "stock"
    """vLLM without speculation."""
    STATIC = "static"
    """vLLM with one draft length."""
    TABLE = "table"
    """vLLM with its own table of draft lengths by batch size."""
    OURS = "ours"


class System(_Strict):
    name: str
    kind: SystemKind
    drafter: str = ""
    draft_tokens: Annotated[int, Field(ge=0)] = 0
    acceptance: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """What the table's author expects of a proposed token."""
    pool: tuple[str, ...] = ()
    chunk_tokens: PositiveInt | None = None
    """--max-num-batched-tokens; None: the testbed's."""
    reference: bool = False
    """In every sitting it takes part in: systems of different sittings are compared through it."""


class Testbed(_Strict):
    __test__ = False  # not a test class
    manifest: Path
    max_draft_tokens: PositiveInt
    engine_arguments: tuple[str, ...]
    more_drafters: tuple[dict[str, Any], ...] = ()
    output_tokens: PositiveInt
    systems: tuple[System, ...]
    groups: dict[str, tuple[str, ...]]

    def system(self, name: str) -> System:
        """Raises KeyError when there is none of that name."""
        return {system.name: system for system in self.systems}[name]

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(system.name for system in self.systems if system.reference)

    def categories(self, group: str) -> tuple[str, ...]:
        if group == ALL_GROUPS:
            return tuple(category for one in self.groups.values() for category in one)
        return self.groups[group]


def load_testbed(file: Path = FOLDER / "testbed.yaml") -> Testbed:
    """Raises FileError."""
    try:
        return Testbed.model_validate(_document(file))
    except ValidationError as error:
        raise _file_error(file, error) from error


def load_scenarios(size: Size, folder: Path = FOLDER / "scenarios") -> list[Scenario]:
    """Every scenario of `folder` at this size, by number. Raises FileError."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise FileError(f"{folder} holds no scenario (*.yaml)")
    return sorted((load_scenario(file, size) for file in files), key=lambda one: one.scenario)


def load_scenario(file: Path, size: Size) -> Scenario:
    """The file's own fields are the default size; its blocks `quick` and `full` replace some of them."""
    document = _document(file)
    sizes = {one: document.pop(one.value, {}) for one in (Size.QUICK, Size.FULL)}
    try:
        return _SCENARIO.validate_python({**document, **sizes.get(size, {})})
    except ValidationError as error:
        raise _file_error(file, error) from error


def check_names(scenarios: Iterable[Scenario], testbed: Testbed) -> None:
    """Every system and group that a scenario names is in the testbed. Raises FileError."""
    systems = {system.name for system in testbed.systems}
    groups = {*testbed.groups, ALL_GROUPS}
    for scenario in scenarios:
        if isinstance(scenario, Cost):
            continue
        _known(f"scenario {scenario.scenario}: systems", scenario.systems, systems)
        _known(f"scenario {scenario.scenario}: groups", groups_of(scenario), groups)


def groups_of(scenario: ComparedScenario) -> tuple[str, ...]:
    if isinstance(scenario, Closed):
        return scenario.groups
    if isinstance(scenario, ShiftingData):
        return tuple(phase.group for phase in scenario.phases)
    return (scenario.group,)


def _known(field: str, names: Iterable[str], known: set[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise FileError(f"{field}: {unknown[0]!r} is not in testbed.yaml, which has {', '.join(sorted(known))}")


def _document(file: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise FileError(f"{file}: cannot be read: {error}") from error
    if not isinstance(document, Mapping):
        raise FileError(f"{file}: must hold fields and values, but is {type(document).__name__}")
    return dict(document)


def _file_error(file: Path, error: ValidationError) -> FileError:
    problems = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'document'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    ]
    return FileError(f"{file}: " + "; ".join(problems))
