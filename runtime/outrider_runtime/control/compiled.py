"""numba with types: what is hot is a plain loop, compiled once and kept on disk.

The code is kept beside its source. An image is built with it (`python -m outrider_runtime.control.warm_up`), so that no
pod compiles. What is not there goes to NUMBA_CACHE_DIR where that is set (a read-only image).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import register_jitable

Function = TypeVar("Function", bound=Callable[..., object])

_PACKAGE = Path(__file__).parents[1]


class Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Code on disk of exactly these sources. numba itself looks at the time of a function's own file: the change of a
    function that is compiled into it goes unseen, and an image that is copied has other times."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        source = Path(inspect.getfile(function))
        folders = source.parent / "__pycache__", self._cache_path
        self._shipped, self._cache_file = (
            IndexDataCacheFile(str(folder), self._impl.filename_base, _stamp(source)) for folder in folders
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        key = self._index_key(sig, target_context.codegen())
        for file in (self._shipped, self._cache_file):
            if (data := self._load(file, key)) is not None:
                return self._impl.rebuild(target_context, data)
        return None

    def _load(self, file: Any, key: Any) -> Any:
        """Code whose argument types another release has moved is a miss (numba raises); its index goes."""
        try:
            return file.load(key)
        except (ImportError, AttributeError):
            with contextlib.suppress(OSError):
                file.flush()
            return None


@functools.cache
def _stamp(source: Path) -> str:
    """Of all sources that this one's machine code may hold parts of."""
    found, todo = set[Path](), [source]
    while todo:
        one = todo.pop()
        todo += () if one in found else _imported(one)
        found.add(one)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(found))).hexdigest()


@functools.cache
def _imported(source: Path) -> tuple[Path, ...]:
    """The package's own files that a file imports from; compiled code sees what its module imported at the top."""
    paths = list[Path]()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_PACKAGE.name):
            module = _PACKAGE.joinpath(*node.module.split(".")[1:])
            paths += module, *(module / name.name for name in node.names)
    files = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths)
    return tuple(file for file in files if file.exists())


def _compile_for_any_server() -> None:
    """For x86-64 CPUs with AVX2 or any ARM one, unless the user names a CPU: what was compiled where an image was built
    runs where it is pulled."""
    host = llvmlite.binding.get_host_cpu_features()
    common = {"x86_64": "x86-64-v3" if host.get("avx2") and host.get("fma") else None, "aarch64": "generic"}
    name = common.get(platform.machine())
    if numba.config.CPU_NAME is None and name is not None:
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = name, ""


_compile_for_any_server()


def compiled(function: Function) -> Function:
    """`function` as machine code, compiled at its first call with arguments of new types."""
    return cast(Function, kept(numba.njit(error_model="numpy")(function)))


def kept(dispatcher: Any) -> Any:
    """What numba returned, with its code on disk; a plain function, as under NUMBA_DISABLE_JIT, as it is."""
    if isinstance(dispatcher, numba.core.dispatcher.Dispatcher):
        dispatcher._cache = Cache(dispatcher.py_func)  # what `cache=True` does
    return dispatcher


def compilable(function: Function) -> Function:
    """Plain Python where Python calls it, and part of the machine code where compiled code does: for a few sums that
    are not worth a call across."""
    return cast(Function, register_jitable(function))
