"""What a release publishes: the workflow, and the chart with the images' digests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from setup.release import CHART, TARGETS, ReleaseError, main, release_values, replace_values, write_chart

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())
DIGESTS = {target: f"sha256:{number}" + "0" * 63 for number, target in enumerate(TARGETS)}


def value(values: dict[str, Any], path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def test_a_releases_chart_names_its_images_by_digest(tmp_path: Path) -> None:
    """A tag that is moved afterwards changes nothing that was installed."""
    chart = write_chart(tmp_path, "1.2.3", "registry.example/outrider/", DIGESTS)
    before = yaml.safe_load((CHART / "values.yaml").read_text())
    after = yaml.safe_load((chart / "values.yaml").read_text())
    set_values = release_values("registry.example/outrider", DIGESTS)
    assert {path: value(after, path) for path in set_values} == set_values
    assert after["runtime"]["image"]["gpu"] == f"registry.example/outrider/runtime@{DIGESTS['runtime']}"
    for path in set_values:  # and changes nothing else
        holder = value(after, path.rpartition(".")[0])
        holder[path.rpartition(".")[2]] = value(before, path)
    assert after == before
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == ("1.2.3", "1.2.3")


def test_a_releases_values_fit_the_schema(tmp_path: Path) -> None:
    chart = write_chart(tmp_path, "1.2.3", "registry.example/outrider", DIGESTS)
    schema = json.loads((chart / "values.schema.json").read_text())["properties"]
    pattern = schema["operator"]["properties"]["image"]["properties"]["digest"]["pattern"]
    assert re.search(pattern, yaml.safe_load((chart / "values.yaml").read_text())["operator"]["image"]["digest"])
    assert "engineVersion" in schema["runtime"]["properties"]


def test_a_release_keeps_profiles_of_its_own_engine(tmp_path: Path) -> None:
    """The values name images, of which the chart knows no engine: the release says it."""
    values = yaml.safe_load((write_chart(tmp_path, "1.2.3", "r", DIGESTS) / "values.yaml").read_text())
    assert values["runtime"]["engineVersion"] == {"gpu": "0.32.0", "cpu": "0.32.0"}


@pytest.mark.parametrize(
    ("version", "digests", "problem"),
    [
        ("v1.2.3", DIGESTS, "is no version"),
        ("1.2.3", {**DIGESTS, "runtime": ""}, "runtime: '' is no digest"),
        ("1.2.3", {"operator": DIGESTS["operator"]}, "a digest is needed for each"),
    ],
)
def test_a_release_of_nothing_is_refused(tmp_path: Path, version: str, digests: dict[str, str], problem: str) -> None:
    """An empty digest would have published a chart with tags that do not exist."""
    with pytest.raises(ReleaseError, match=problem):
        write_chart(tmp_path, version, "registry.example", digests)


def test_a_renamed_value_fails_the_release() -> None:
    with pytest.raises(ReleaseError, match=r"no operator\.image\.digest"):
        replace_values("operator:\n  image: {}\n", {"operator.image.digest": "x"})


def test_workflow_publishes_every_target_by_this_program(tmp_path: Path) -> None:
    """The images that it builds are the Dockerfile's, and its command is one that this repository takes."""
    targets = {*TARGETS, "plugin"}
    assert set(WORKFLOW["jobs"]["images"]["strategy"]["matrix"]["target"]) == targets
    assert targets <= set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    steps = [step.get("run", "") for step in WORKFLOW["jobs"]["chart"]["steps"]]
    (command,) = (step for step in steps if "setup.release" in step)
    words = command.replace('"$REGISTRY"', "registry.example").replace('"${GITHUB_REF_NAME#v}"', "1.2.3")
    words = re.sub(r'"\$\(cat digests/([\w-]+)\)"', lambda match: DIGESTS[match[1]], words)
    words = words.replace("--output release", f"--output {tmp_path}")
    assert main(words.partition("setup.release")[2].split()) == 0
    assert (tmp_path / "outrider" / "Chart.yaml").is_file()


@pytest.mark.parametrize(("tag", "status"), [("v{}", 0), ("v9.9.9", 1), ("v{}0", 1)])
def test_a_tag_that_is_not_the_version_publishes_nothing(tag: str, status: int) -> None:
    """Bug: the images were pushed before the tag was compared with the version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (command,) = (step["run"] for step in WORKFLOW["jobs"]["check"]["steps"] if "tag" in step.get("name", ""))
    environment = {**os.environ, "GITHUB_REF_NAME": tag.format(version)}
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=False).returncode == status


def test_the_workflow_names_no_registry_of_its_own() -> None:
    """A fork does not push into a registry of others: without the variable nothing runs."""
    assert WORKFLOW["jobs"]["check"]["if"] == WORKFLOW["jobs"]["images"]["if"] == "vars.REGISTRY != ''"
    assert [WORKFLOW["jobs"][job]["needs"] for job in ("images", "chart", "wheel")] == ["check", "images", "chart"]
    assert WORKFLOW["env"] == {"REGISTRY": "${{ vars.REGISTRY }}"}
