"""Names that moved between the versions of vLLM are imported from where the installed one has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outrider_runtime.vllm_plugin import versions


def test_moved_name_comes_from_the_module_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MOVED", {"dumps": ("json.no_such_module", "no_such_package.module", "os", "json")})
    assert versions.dumps is json.dumps


def test_name_that_no_module_has_is_no_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MOVED", {"dumps": ("os",)})
    with pytest.raises(AttributeError, match="has no attribute 'dumps'"):
        _ = versions.dumps


def test_package_that_vllm_needs_is_named_if_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not: the name is looked for elsewhere, and the error is about that."""
    tmp_path.joinpath("moved_module.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(versions, "MOVED", {"dumps": ("moved_module", "json")})
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        _ = versions.dumps
