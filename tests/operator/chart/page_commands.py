"""Run the shell commands of documentation pages on a cluster, in order, as one script."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from setup.steps import REPOSITORY
from tests.cluster.cluster import Cluster

REGISTRY = "registry.example.com/team"
"""The pages' own name for the reader's registry."""
PATIENCE_S = 600.0
PATIENT_CURL = (r"^curl -s ", "curl -sS --fail-with-body --retry 20 --retry-connrefused --retry-delay 1 ")
"""A port is forwarded in the background, and answers a moment later."""


def adapted(texts: Iterable[str], substitutions: Sequence[tuple[str, str]]) -> list[str]:
    """Rewrite commands for this cluster; a pattern that matches no command any more fails."""
    rewritten = list(texts)
    for pattern, replacement in substitutions:
        before = rewritten
        rewritten = [re.sub(pattern, replacement, text) for text in before]
        assert rewritten != before, f"no command has {pattern!r} any more"
    return rewritten


def printed_by(lines: Iterable[str], cluster: Cluster) -> str:
    """What the terminal shows when a reader types these lines; each must end with 0. A port that is forwarded may have
    ended with its pod."""
    done = subprocess.run(
        ["bash", "-c", "set -eo pipefail\ntrap 'kill $(jobs -p) || true' EXIT\n" + "\n".join(lines)],
        env=_reader_environment(cluster), cwd=REPOSITORY, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def _reader_environment(cluster: Cluster) -> Mapping[str, str]:
    """The cluster's, and this environment's programs on the PATH, for `kubectl outrider`."""
    environment = cluster.environment
    return environment | {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "REGISTRY": REGISTRY}


def assert_shown(output: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        assert re.search(pattern, output, re.MULTILINE), f"{pattern} is not in:\n{output}"
