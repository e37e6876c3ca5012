"""docs/ builds as a site, every page is in its index, and no link is broken."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from outrider_crds.service import SpeculativeService

REPOSITORY = Path(__file__).parents[3]
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))
_LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)")
_FENCE = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_site_builds_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """mkdocs warns of links and anchors that lead nowhere, and of pages that its index leaves out."""
    with caplog.at_level(logging.WARNING):
        build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(tmp_path)))
    assert [record.getMessage() for record in caplog.records] == []
    assert (tmp_path / "tutorials" / "laptop" / "index.html").exists()


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "charts/outrider/README.md"])
def test_links_of_a_page_outside_docs_lead_to_files(name: str) -> None:
    page = REPOSITORY / name
    missing = [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_manifests_in_the_docs_are_valid() -> None:
    """A manifest that a reader copies is taken by the API's own models."""
    manifests = [
        document
        for page in PAGES
        for text in _FENCE.findall(page.read_text())
        if isinstance(document := yaml.safe_load(text), dict) and document.get("kind") == "SpeculativeService"
    ]
    assert manifests
    for manifest in manifests:
        SpeculativeService.model_validate(manifest)
