"""The CustomResourceDefinition that stands in the repository is the one that the models say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outrider_crds.generate import CRD_FILE, crd, crd_text, main
from outrider_crds.rules import RULES


def test_the_file_is_up_to_date() -> None:
    """A change of the models without `outrider-crds` fails here."""
    assert CRD_FILE.read_text() == crd_text(), "run `outrider-crds` and commit the result"


def test_check_tells_a_stale_file_from_a_fresh_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`outrider-crds --check` writes nothing and names the remedy."""
    path = tmp_path / "crd.yaml"
    assert main(["--check", "--output", str(path)]) == 1
    assert "run `outrider-crds`" in capsys.readouterr().err
    assert not path.exists()
    assert main(["--output", str(path)]) == 0
    assert main(["--check", "--output", str(path)]) == 0
    path.write_text(path.read_text().replace("maxSurge", "maxSurges"))
    assert main(["--check", "--output", str(path)]) == 1


def test_every_list_text_and_map_of_the_spec_is_bounded() -> None:
    """CEL's cost is estimated from the bounds; without one the API server refuses the whole CRD."""
    unbounded = [path for path, node in _nodes(_schema()["properties"]["spec"], "spec") if not _bounded(node)]
    assert unbounded == []


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_field_is_described(part: str) -> None:
    """`kubectl explain` says something about each."""
    silent = [path for path, node in _fields(_schema()["properties"][part], part) if not node.get("description")]
    assert silent == []


def test_kubectl_explain_names_every_method() -> None:
    """`kubectl explain` shows four values of an enum: the others stand in its description only."""
    method = _schema()["properties"]["spec"]["properties"]["draftPool"]["items"]["properties"]["method"]
    assert [name for name in method["enum"] if name not in method["description"]] == []


def test_every_rule_is_in_the_file() -> None:
    """A rule on a model that the resource does not hold would never be checked."""
    rules = {r["rule"] for _, node in _nodes(_schema(), "") for r in node.get("x-kubernetes-validations", [])}
    assert rules == {rule.cel for rule in RULES}


def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _fields(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in node.get("properties", {}).items():
        if node.get("x-kubernetes-preserve-unknown-fields"):
            return  # Kubernetes' own type: described in its own place
        yield f"{path}.{name}", child
        yield from _fields(child, f"{path}.{name}")
    if "items" in node:
        yield from _fields(node["items"], f"{path}[]")


def _nodes(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from _nodes(node[key], f"{path}[]")


def _bounded(node: dict[str, Any]) -> bool:
    match node.get("type"):
        case "string":
            return "maxLength" in node or "enum" in node
        case "array":
            return "maxItems" in node
        case "object" if "additionalProperties" in node:
            return "maxProperties" in node
        case "integer":
            return "maximum" in node
    return True
