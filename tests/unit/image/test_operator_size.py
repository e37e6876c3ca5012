"""How much the operator's image holds: what the extra `operator` installs, as this virtual environment has it."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
MOST_MB = 132
"""Measured: 124 MB, 74 of them the Kubernetes client, 18 the CEL interpreter and its command line. The image has
Python's compiled files, too."""


def installed(requirements: list[str]) -> dict[str, int]:
    """Bytes of each distribution that `requirements` bring along, without Python's compiled files."""
    sizes: dict[str, int] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        extras = {"", *requirement.extras}
        distribution = metadata.distribution(requirement.name)
        name = distribution.metadata["Name"].lower()
        if name in sizes:
            continue
        files = [file for file in distribution.files or () if file.suffix != ".pyc"]
        sizes[name] = sum(file.size or 0 for file in files)
        further_ones = (Requirement(text) for text in distribution.requires or ())
        waiting += [
            further
            for further in further_ones
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return sizes


def test_the_operator_brings_no_more_than_its_budget() -> None:
    """A dependency that brings a numerical library along would make each pull of the image a minute longer."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sizes = installed([*project["dependencies"], *project["optional-dependencies"]["operator"]])
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    assert sum(sizes.values()) / 1e6 <= MOST_MB, f"the largest are {', '.join(largest)}"
