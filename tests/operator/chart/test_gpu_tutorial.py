"""docs/tutorials/gpu-cluster.md on a cluster: its own commands, in order, with the stand-in runtime on a GPU node.

What differs from a reader's run: images come under the tutorial's names without a build, the manifest runs the stand-in
and takes less memory, and the forwarded port is a free one.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from setup.steps import REPOSITORY
from tests.cluster.cluster import Cluster
from tests.operator import manifests
from tests.ports import free_port

pytestmark = pytest.mark.cluster

PAGE = REPOSITORY / "docs" / "tutorials" / "gpu-cluster.md"
MANIFEST = "examples/llama-one-gpu.yaml"
REGISTRY = "registry.example.com/team"
PATIENCE_S = 600.0
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def output(bare: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the terminal shows when all of the tutorial's commands are run; each must end with 0."""
    spec = yaml.safe_load((REPOSITORY / MANIFEST).read_text())["spec"]
    bare.add_node(product=spec["accelerator"]["products"][0], gpus=1)
    for name in ("operator", "runtime"):
        bare.import_image(f"{REGISTRY}/outrider/{name}:0.1.0")
    script = _script(_standin(tmp_path_factory.mktemp("tutorial")), free_port())
    done = subprocess.run(
        ["bash", "-c", script], env=bare.environment, cwd=REPOSITORY, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_gpu_tutorial_commands_all_succeed_in_order(output: str) -> None:
    """A user's first hour: from helm install to an answer, a patched pool, and the cleanup."""
    for line in (
        r"speculativeservice.outrider.dev/llama condition met",
        r'"choices"',
        r"llama +meta-llama/Llama-3.1-8B-Instruct +NVIDIA-H100-80GB-HBM3 +True +1",
        r"speculativeservice.outrider.dev/llama patched",
        r'speculativeservice.outrider.dev "llama" deleted',
        r'release "outrider" uninstalled',
    ):
        assert re.search(line, output), f"{line} is not in:\n{output}"


def _script(manifest: Path, port: int) -> str:
    """The blocks after that of the images, as one script."""
    blocks = _BLOCK.findall(PAGE.read_text())
    images, commands = blocks[0], "".join(blocks[1:])
    assert "docker push" in images
    for old, new in (
        (MANIFEST, str(manifest)),
        ("8000:80 &", f"{port}:80 >/dev/null &"),
        ("localhost:8000", f"localhost:{port}"),
        ("curl -s ", "curl -sS --fail-with-body --retry 20 --retry-connrefused --retry-delay 1 "),
    ):
        assert old in commands, f"the tutorial has no {old!r} any more"
        commands = commands.replace(old, new)
    return f"set -eo pipefail\ntrap 'kill $(jobs -p)' EXIT\nexport REGISTRY={REGISTRY}\n{commands}"


def _standin(folder: Path) -> Path:
    """The tutorial's manifest for a node of this machine."""
    document = yaml.safe_load((REPOSITORY / MANIFEST).read_text())
    document["spec"]["engine"]["env"] = manifests.environment()
    document["spec"]["podTemplate"] = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    document["spec"]["rollout"]["drainTimeout"] = "5s"
    path = folder / "llama.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
