"""The Dockerfile's targets, built: where buildah or Docker is, and their bases can be pulled or made."""

from __future__ import annotations

import os

import pytest

from tests.images.builder import builder, check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

MOST_MB = {"operator": 190, "runtime": 25, "runtime-cpu": 7000}
"""Target -> budget of what it has above its base (docs/how-to/build-images.md): of /opt."""


@pytest.mark.parametrize("target", MOST_MB)
def test_a_target_is_built_and_keeps_its_budget(target: str) -> None:
    """The Dockerfile's last steps start the programs, so that an image without a library that they need is not made."""
    if os.environ.get("OUTRIDER_BUILD_IMAGES") not in ("all", target):
        pytest.skip(f"OUTRIDER_BUILD_IMAGES={target} builds it, =all every target")
    program = builder()
    image = program.build(target)
    limit = f'test "$(du -sm /opt | cut -f1)" -le {MOST_MB[target]} || {{ du -sm /opt/*; exit 1; }}'
    check(program.run("build", "--file", "-", ".", text=f"FROM {image}\nUSER root\nRUN {limit}\n"))
