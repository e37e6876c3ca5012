"""The commands of docs/how-to on a cluster, as one story: installed, watched, patched, upgraded and removed.

What differs from a reader's run: images come under the pages' names without a build, the service runs the stand-in on a
CPU node, placeholders have values, and forwarded ports are free ones.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.documented_commands import DOCS, Command, Runner, commands_of
from tests.operator import manifests
from tests.operator.chart.page_commands import PATIENT_CURL, REGISTRY, adapted, assert_shown, printed_by
from tests.ports import free_port

pytestmark = pytest.mark.cluster

TAG = "0.1.1"
SERVICE = "my-llama"
FIRST, LAST = "how-to/build-images.md", "how-to/upgrade-and-uninstall.md"
ENDLESS = (" -w", "--for=condition=Stalled")
"""Commands that go on until the reader stops them, or a fault occurs: they are ended after three seconds."""
_PORT = free_port()
_POD = f"$(kubectl get pods -l outrider.dev/service={SERVICE} -o name | head -1)"
_SUBSTITUTIONS = (
    (r"\bREGISTRY\b", REGISTRY),
    (r"\b(NAME|(?<=specsvc )chat)\b", SERVICE),
    (r"\b(NEW|TAG)\b", TAG),
    (r"\bPOD 9000 &", f"{_POD} {_PORT}:9000 >/dev/null &"),
    (r"localhost:9000", f"localhost:{_PORT}"),
    (r"^helm install ", "helm install --set allowedHostPaths={/srv} "),
    PATIENT_CURL,
)
_PATCH = re.compile(r"^```yaml\n(?:#.*\n)?(- op: add\n.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def output(bare: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the terminal shows when all commands are run; each must end with 0."""
    for image in ("operator:0.1.0", "runtime-cpu:0.1.0", f"operator:{TAG}", f"runtime-cpu:{TAG}"):
        bare.import_image(f"{REGISTRY}/outrider/{image}")
    bare.kubectl("create", "namespace", "models")
    return printed_by(_story(tmp_path_factory.mktemp("how-to")), bare)


def test_how_to_commands_all_succeed_in_order(output: str) -> None:
    """Commands of a new page are run as soon as they stand there."""
    assert_shown(
        output,
        (
            rf"speculativeservice.outrider.dev/{SERVICE} condition met",
            rf"^{SERVICE} +tests/{SERVICE} +cpu +True +1",
            r"1 request: k = 0",
            r'"name":"eagle-ours"',
            rf"speculativeservice.outrider.dev/{SERVICE} annotated",
            r"rolebinding.rbac.authorization.k8s.io/llama-chat-epp created",
            r'Release "outrider" has been upgraded',
            rf'speculativeservice.outrider.dev "{SERVICE}" deleted',
            r'"speculativeservices.outrider.dev" deleted',
        ),
    )


def _story(folder: Path) -> list[str]:
    """Installation first, then a service, then page by page; upgrade and uninstallation last."""
    story = sorted(commands_of(Runner.CLUSTER_STORY), key=lambda command: (command.page == LAST, command.page != FIRST))
    installed = next(at for at, command in enumerate(story) if command.page != FIRST)
    service = folder / "service.yaml"
    service.write_text(yaml.safe_dump(manifests.service(SERVICE, "default")))
    texts = adapted((_with_own_patch(command, folder).text for command in story), _SUBSTITUTIONS)
    lines = [_announced(command.page, text) for command, text in zip(story, texts, strict=True)]
    return [
        *lines[:installed],
        "kubectl rollout status -n outrider-system deploy/outrider --timeout=5m",
        f"kubectl apply -f {service}",
        f"kubectl wait specsvc/{SERVICE} --for=condition=Ready --timeout=5m",
        *lines[installed:],
    ]


def _announced(page: str, text: str) -> str:
    """The command behind a line that names its page; an endless one is ended."""
    if any(mark in text for mark in ENDLESS):
        text = f"timeout 3 {text} || test $? = 124"
    return f"echo '## {page}'\n{text}"


def _with_own_patch(command: Command, folder: Path) -> Command:
    """The command with the patch file of its page, where it takes one."""
    name = "my-draft-patch.yaml"
    if name not in command.text:
        return command
    return replace(command, text=command.text.replace(name, str(_patch(command.page, folder))))


def _patch(page: str, folder: Path) -> Path:
    """The page's own patch of the pool, with a head that is on this machine."""
    fence = _PATCH.search((DOCS / page).read_text())
    assert fence is not None, f"{page} shows no patch"
    (change,) = yaml.safe_load(fence[1])
    change["value"]["eagle"] = manifests.EAGLE["eagle"]
    path = folder / f"{Path(page).stem}.yaml"
    path.write_text(yaml.safe_dump([change]))
    return path
