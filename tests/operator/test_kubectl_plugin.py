"""`kubectl outrider` as users run it: a real kubectl finds the plugin, reads a real service and asks a real pod."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.operator.conftest import Make

pytestmark = pytest.mark.cluster


def test_plugin_shows_each_screen_of_a_service(cluster: Cluster, make: Make, tmp_path: Path) -> None:
    service = make("seen", standin={"tokens_per_s": 200})
    service.wait_updated()
    plugin = tmp_path / "kubectl-outrider"
    plugin.write_text(f'#!/bin/sh\nexec {sys.executable} -m outrider_crds.kubectl_plugin "$@"\n')
    plugin.chmod(0o755)
    environment = {**cluster.environment, "PATH": f"{tmp_path}{os.pathsep}{cluster.environment['PATH']}"}
    for command, words in (
        ("status", "UpToDate"),
        ("drafts", "lookup"),
        ("adapters", ""),
        ("profile", "cpu"),
        ("demand", ""),
        ("why", ""),
    ):
        arguments = ["kubectl", "outrider", command, service.name, "-n", service.namespace]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        assert "\x1b" not in done.stdout
