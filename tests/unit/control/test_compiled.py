"""Machine code on disk: an image brings it along, and it always belongs to the present sources."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numba.core.registry import cpu_target
from outrider_runtime.control.compiled import borrowed, compiled, keep_alive
from outrider_runtime.processor import portable_cpu_variables

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


def test_cache_with_moved_types_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert list(tmp_path.rglob("code_that_stays.total*.nbc")), "nothing is cached"


@pytest.mark.skipif(not portable_cpu_variables({}), reason="this CPU is none of any server's")
def test_code_runs_on_other_machines_than_its_builder() -> None:
    """An image is built on one machine and runs on another; code for the builder's CPU would be compiled once more."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    assert (name, features) in (("x86-64-v3", ""), ("generic", ""))


CALLEE = "from outrider_runtime.control.compiled import compiled\n\n@compiled\ndef factor():\n    return {}\n"
CALLER = """
from outrider_runtime.control.compiled import compiled
from outrider_runtime.callee import factor

@compiled
def scaled(value):
    return value * factor()
"""
FORKS = """
import json, os, sys
from pathlib import Path
import numba, outrider_runtime
from outrider_runtime.control import compiled

def answer(folder, environment):
    os.environ.update(environment)
    numba.config.reload_config()
    outrider_runtime.__path__.append(folder)
    compiled._PACKAGE = Path(folder)
    from outrider_runtime.caller import scaled
    print(scaled(3), sum(scaled.stats.cache_hits.values()), flush=True)

for line in sys.stdin:
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        if status:
            print("ended with", status, flush=True)
    else:
        ended = 1
        try:
            answer(*json.loads(line))
            ended = 0
        finally:
            os._exit(ended)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """Forks the twenty processes of this file after loading numba once, which takes a second; nothing is compiled."""
    # A module that is written twice within a second has the bytecode of its first text: -B writes none.
    command = [sys.executable, "-B", "-W", "error", "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.fixture
def ask(tmp_path: Path, forks: subprocess.Popen[str]) -> Callable[..., str]:
    """Run a fresh process: its answer, and how many functions it loaded from disk."""
    folder = tmp_path / "outrider_runtime"
    folder.mkdir()
    (folder / "caller.py").write_text(CALLER)

    def answer(factor: int, **environment: str) -> str:
        (folder / "callee.py").write_text(CALLEE.format(factor))
        assert forks.stdin
        assert forks.stdout
        forks.stdin.write(json.dumps([str(folder), environment]) + "\n")
        forks.stdin.flush()
        return forks.stdout.readline().strip()

    return answer


@pytest.mark.slow
def test_change_in_an_inlined_function_is_noticed(ask: Callable[..., str]) -> None:
    assert [ask(2), ask(2), ask(5)] == ["6 0", "6 1", "15 0"]


@pytest.mark.slow
def test_code_of_an_image_is_used_with_a_volume_for_the_rest(ask: Callable[..., str], tmp_path: Path) -> None:
    """A pod's root is read-only and its cache empty: it would compile for minutes."""
    ask(2)
    volume = tmp_path / "volume"
    assert ask(2, NUMBA_CACHE_DIR=str(volume)) == "6 1"
    assert not list(volume.rglob("*.nbc")), "it was compiled once more"
    assert ask(5, NUMBA_CACHE_DIR=str(volume)) == "15 0"
    assert list(volume.rglob("*.nbc")), "nothing is kept"


@pytest.mark.slow
def test_damaged_file_is_compiled_again(ask: Callable[..., str], tmp_path: Path) -> None:
    """Bug: an empty file, as a node that loses power leaves, made every start fail until it was deleted by hand. Zeros
    within machine code crash the process, or make it compute wrong numbers."""
    ask(2)
    damages: tuple[Callable[[bytes], bytes], ...] = (
        lambda _code: b"", lambda code: code[: len(code) // 2],
        lambda code: code[: len(code) // 3] + bytes(512) + code[len(code) // 3 + 512 :],
    )  # fmt: skip
    for damage in damages:
        for file in tmp_path.rglob("*.nbc"):
            file.write_bytes(damage(file.read_bytes()))
        assert [ask(2), ask(2)] == ["6 0", "6 1"]


def test_types_and_functions_of_one_name_have_separate_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: another module's tuple of the same name, with its fields in another order, found the code of the first."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_way.py").write_text(TYPES)
    (tmp_path / "other_way.py").write_text(TYPES.replace("x: int\n    y: int", "y: int\n    x: int"))
    (tmp_path / "twins.py").write_text(
        "from outrider_runtime.control.compiled import compiled\n"
        "first = compiled(lambda point: point.x)\nsecond = compiled(lambda point: point.y)\n"
    )
    points = [importlib.import_module(name).Point(1, 2) for name in ("one_way", "other_way")]
    for _ in range(2):  # the second time from the disk
        sys.modules.pop("twins", None)
        twins = importlib.import_module("twins")
        assert [(twins.first(point), twins.second(point)) for point in points] == [(1, 2), (2, 1)]


@pytest.mark.slow
def test_code_of_old_sources_is_deleted(ask: Callable[..., str], tmp_path: Path) -> None:
    """A volume would fill up, release after release."""
    ask(2)
    before = {file.name for file in tmp_path.rglob("*.nbc")}
    ask(5)
    after = {file.name for file in tmp_path.rglob("*.nbc")}
    assert len(after) == len(before)
    assert not before & after


@pytest.mark.slow
def test_code_that_cannot_be_written_is_compiled_by_each_process(ask: Callable[..., str], tmp_path: Path) -> None:
    """Bug: a full volume ended the pod, which had the code in memory."""
    (tmp_path / "full").write_text("no folder")
    assert [ask(2, NUMBA_CACHE_DIR=str(tmp_path / "full")) for _ in range(2)] == ["6 0", "6 0"]


def test_function_that_closes_over_values_is_refused() -> None:
    """Its file could not be distinguished from that of the same function over other values."""
    factor = len(CODE)
    with pytest.raises(ValueError, match="closes over values"):
        compiled(lambda value: value * factor)


@compiled
def sum_of_borrowed(size: int, rounds: int) -> float:
    total = 0.0
    for number in range(rounds):
        owned = np.full(size, number), (np.full(size, 1.0), 2.0)
        parts = borrowed(owned)
        replaced = np.full(size, -1.0)  # would lie where `owned` was, had it been freed
        total += (parts[0] + parts[1][0] * parts[1][1]).sum() + 0.0 * replaced.sum()
        keep_alive(owned)
    return total


def test_borrowed_arrays_live_until_keep_alive() -> None:
    """A decision computes with arrays whose references are not counted; none of them may be freed under it."""
    rounds = sum(1000 * (number + 2.0) for number in range(50))
    assert sum_of_borrowed(1000, 50) == sum_of_borrowed.py_func(1000, 50) == rounds  # type: ignore[attr-defined]


def test_value_with_another_owner_cannot_be_borrowed() -> None:
    """Bug: only arrays lost their owner. A text in the tuple would have been freed while the caller has it."""

    @compiled
    def length(name: str) -> int:
        return len(borrowed((1.0, name))[1])

    with pytest.raises(TypeError, match="unicode_type cannot be borrowed"):
        length("name")
