"""docs/tutorials/gpu-cluster.md on a cluster: its own commands, in order, with the stand-in runtime on a GPU node.

What differs from a reader's run: images come under the tutorial's names without a build, the manifest runs the stand-in
and takes less memory, and the forwarded port is a free one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from setup.steps import REPOSITORY
from tests.cluster.cluster import Cluster
from tests.documented_commands import Runner, commands_of
from tests.operator import manifests
from tests.operator.chart.page_commands import PATIENT_CURL, REGISTRY, adapted, assert_shown, printed_by
from tests.ports import free_port

pytestmark = pytest.mark.cluster

MANIFEST = "examples/llama-one-gpu.yaml"


@pytest.fixture(scope="module")
def output(bare: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the terminal shows when all of the tutorial's commands are run; each must end with 0."""
    spec = yaml.safe_load((REPOSITORY / MANIFEST).read_text())["spec"]
    bare.add_node(product=spec["accelerator"]["products"][0], gpus=1)
    for name in ("operator", "runtime"):
        bare.import_image(f"{REGISTRY}/outrider/{name}:0.1.0")
    port, manifest = free_port(), _standin(tmp_path_factory.mktemp("tutorial"))
    substitutions = (
        (MANIFEST, str(manifest)),
        ("8000:80 &", f"{port}:80 >/dev/null &"),
        ("localhost:8000", f"localhost:{port}"),
        PATIENT_CURL,
    )
    commands = [command.text for command in commands_of(Runner.GPU_TUTORIAL)]
    return printed_by(adapted(commands, substitutions), bare)


def test_gpu_tutorial_commands_all_succeed_in_order(output: str) -> None:
    """A user's first hour: from helm install to an answer, a patched pool, and the cleanup."""
    assert_shown(
        output,
        (
            r"speculativeservice.outrider.dev/llama condition met",
            r'"choices"',
            r"llama +meta-llama/Llama-3.1-8B-Instruct +NVIDIA-H100-80GB-HBM3 +True +1",
            r"speculativeservice.outrider.dev/llama patched",
            r'speculativeservice.outrider.dev "llama" deleted',
            r'release "outrider" uninstalled',
        ),
    )


def _standin(folder: Path) -> Path:
    """The tutorial's manifest for a node of this machine."""
    document = yaml.safe_load((REPOSITORY / MANIFEST).read_text())
    document["spec"]["engine"]["env"] = manifests.environment()
    document["spec"]["podTemplate"] = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    document["spec"]["rollout"]["drainTimeout"] = "5s"
    path = folder / "llama.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
