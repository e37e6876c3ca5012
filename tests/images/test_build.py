"""The Dockerfile's targets, built: where buildah or Docker is, and their bases can be pulled or made."""

from __future__ import annotations

import os

import pytest

from tests.images.builder import builder, check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

OWN = "du -sb /opt | cut -f1"
"""Bytes that an image has above its base."""
PULLED = "tar -cz /outrider | wc -c"
"""Bytes of it that go over the network."""
BUDGETS = {"operator": (OWN, 200), "runtime": (OWN, 27), "runtime-cpu": (OWN, 7400), "plugin": (PULLED, 18)}
"""Target -> what counts, and how many MB at most (docs/how-to/build-images.md)."""


@pytest.mark.parametrize("target", BUDGETS)
def test_a_target_is_built_and_keeps_its_budget(target: str) -> None:
    """The Dockerfile's last steps start the programs, so that an image without a library that they need is not made."""
    if os.environ.get("OUTRIDER_BUILD_IMAGES") not in ("all", target):
        pytest.skip(f"OUTRIDER_BUILD_IMAGES={target} builds it, =all every target")
    program = builder()
    image = program.build(target)
    measure, most_mb = BUDGETS[target]
    limit = f'size=$({measure}); echo "$size bytes, at most {most_mb} MB"; test "$size" -le {most_mb}000000'
    check(program.run("build", "--file", "-", ".", text=f"FROM {image}\nUSER root\nRUN {limit}\n"))
