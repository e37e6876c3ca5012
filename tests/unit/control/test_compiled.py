"""Code that was compiled by another release lies in the same cache."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

CODE = """
from typing import NamedTuple
from outrider_runtime.control.compiled import compiled
from {types} import Point

@compiled
def total(point):
    return point.x + point.y

def ask():
    return total(Point(1, 2))
"""
TYPES = "from typing import NamedTuple\n\nclass Point(NamedTuple):\n    x: int\n    y: int\n"


def test_a_cache_whose_types_have_moved_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: with numba's cache on a volume, the release after a module was renamed raised ModuleNotFoundError."""
    monkeypatch.syspath_prepend(tmp_path)
    for types in ("types_of_yesterday", "types_of_today"):
        (tmp_path / f"{types}.py").write_text(TYPES)
        (tmp_path / "code_that_stays.py").write_text(CODE.format(types=types))
        importlib.invalidate_caches()
        sys.modules.pop("code_that_stays", None)
        assert importlib.import_module("code_that_stays").ask() == 3
        (tmp_path / f"{types}.py").unlink()
        del sys.modules[types]
        assert list(tmp_path.rglob("code_that_stays.total*.nbi")), "nothing is cached"
