"""Installation of this checkout's chart."""

from __future__ import annotations

from pathlib import Path

from setup.steps import REPOSITORY
from tests.cluster.kubectl import Kubectl

VALUES = Path(__file__).with_name("values.yaml")


def install_outrider(cluster: Kubectl) -> None:
    """Install the operator with the demo's values, and wait until it is ready. Raises ClusterError."""
    cluster.helm(
        "install", "outrider", str(REPOSITORY / "charts" / "outrider"), "-n", "outrider-system", "--create-namespace",
        "-f", str(VALUES), "--wait", "--timeout", "5m",
    )  # fmt: skip
