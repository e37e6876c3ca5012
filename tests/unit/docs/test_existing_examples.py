"""Outrider's lines in the manifests of other platforms: few, and all that is different."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from setup.steps import REPOSITORY

EXAMPLES = REPOSITORY / "examples" / "existing"
RENDERED = REPOSITORY / "tests" / "e2e" / "platform_objects"
MARK = "# Outrider"
MOST_LINES = 10
VOLUME = "outrider-config"


@pytest.mark.parametrize("platform", ["production-stack", "llm-d"])
def test_platform_needs_at_most_ten_lines(platform: str) -> None:
    lines = (EXAMPLES / f"{platform}-values.yaml").read_text().splitlines()
    ours = [line for line in lines if line.endswith(MARK)]
    assert 0 < len(ours) <= MOST_LINES
    assert yaml.safe_load("\n".join(line for line in lines if line not in ours))


def test_patch_of_a_deployment_has_at_most_ten_lines() -> None:
    lines = (EXAMPLES / "outrider-patch.yaml").read_text().splitlines()
    assert len(lines) - lines.index("      - name: vllm") - 1 <= MOST_LINES


@pytest.mark.parametrize("platform", ["production-stack", "llm-d"])
def test_rendered_objects_without_our_lines_are_as_they_were(platform: str) -> None:
    """What the platform's chart makes of its values with and without Outrider's lines differs in nothing else."""
    ours, theirs = (_rendered(f"{platform}-{how}-outrider.yaml") for how in ("with", "without"))
    assert ours != theirs
    assert [_without_ours(document) for document in ours] == theirs


def _rendered(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((RENDERED / name).read_text()) if document]


def _without_ours(document: dict[str, Any]) -> dict[str, Any]:
    if document["kind"] != "Deployment":
        return document
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for owner, field, names in (
        (container, "env", ("OUTRIDER", "OUTRIDER_CONFIG")),
        (container, "volumeMounts", (VOLUME,)),
        (pod, "volumes", (VOLUME,)),
    ):
        kept = [item for item in owner[field] if item["name"] not in names]
        owner.update({field: kept} if kept else {})
        if not kept:
            del owner[field]
    return document
