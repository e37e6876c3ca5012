"""The Dockerfile agrees with the repository; docs/how-to/build-images.md says how to build.

These hold it against the files that it copies and the pods that run its images.
"""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from outrider_operator.decide.pod_spec.container import RUN_AS

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("operator", "runtime", "runtime-cpu")


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all_of(self, instruction: str) -> list[str]:
        return [argument for name, argument in self.steps if name == instruction]


def _stages() -> dict[str, Stage]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stages: dict[str, Stage] = {}
    for instruction, argument in lines:
        if instruction == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", argument).groups()  # type: ignore[union-attr]
            current = stages[name] = Stage(name, base)
        elif instruction != "ARG":
            current.steps.append((instruction, argument))
    return stages


STAGES = _stages()


def test_the_three_targets_are_there() -> None:
    """Their names are in the README and in the chart's defaults."""
    assert set(TARGETS) <= set(STAGES)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_the_user_that_pods_ask_for(target: str) -> None:
    """The last USER is numeric, so that runAsNonRoot can be checked without the image's passwd."""
    assert STAGES[target].all_of("USER")[-1] == f"{RUN_AS}:{RUN_AS}"


@pytest.mark.parametrize("target", TARGETS)
def test_an_entry_point_is_a_program_of_ours(target: str) -> None:
    """A renamed script would leave an image that cannot start."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (entry,) = STAGES[target].all_of("ENTRYPOINT")
    assert json.loads(entry)[0] in scripts


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_no_package_installer_and_no_context(target: str) -> None:
    """Final stages copy from other stages only, and install nothing with pip or uv."""
    assert all(copy.startswith("--from=") for copy in STAGES[target].all_of("COPY"))
    assert not any(re.search(r"\b(pip|uv pip) install\b", run) for run in STAGES[target].all_of("RUN"))


def test_what_is_copied_is_there_and_reaches_the_build() -> None:
    """Each source of a COPY exists, and .dockerignore lets it through; each --from names a stage."""
    for stage in STAGES.values():
        for copy in stage.all_of("COPY"):
            *sources, _ = copy.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in STAGES
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                assert _in_context(source), f"{source} is kept out by .dockerignore"


def test_every_stage_starts_from_an_image_that_can_be_replaced() -> None:
    """Bases are build arguments, so that a mirror or a base of one's own can be used."""
    text = (ROOT / "Dockerfile").read_text()
    for stage in STAGES.values():
        name = re.fullmatch(r"\$\{(\w+)\}", stage.base)
        assert name is not None, stage.base
        assert f"ARG {name[1]}=" in text


def _in_context(path: str) -> bool:
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch.fnmatch(path, pattern):
            kept = line.startswith("!")
    return kept
