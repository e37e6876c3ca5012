"""numba with types: what is hot is a plain loop, compiled once and kept on disk.

The code is kept beside its source, in NUMBA_CACHE_DIR where that is set (a read-only image), and looked for in both. An
image is built with it (`python -m outrider_runtime.control.warm_up`), so that no pod compiles.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import glob
import hashlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.extending import register_jitable

from outrider_runtime.processor import portable_cpu_variables
from outrider_runtime.whole_file import write_whole

Function = TypeVar("Function", bound=Callable[..., object])

_PACKAGE = Path(__file__).parents[1]

os.environ.update(portable_cpu_variables(os.environ))  # before numba starts; it reads the environment again later
numba.config.reload_config()


class Cache(NullCache):  # type: ignore[misc]  # numba has no types
    """Machine code on disk, a file for each function, its sources and the types of its arguments.

    numba's own cache looks at the time of a function's own file: the change of a function that is compiled into it goes
    unseen, and an image that is copied has other times. Its files keep their names over releases, so that processes
    that save at the same time, or a full disk, leave one release's code under another's index.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        source = Path(inspect.getfile(function))
        beside = source.parent / "__pycache__"
        self._own = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else beside
        self._folders = dict.fromkeys((beside, self._own))
        self._name = f"{function.__module__}.{function.__qualname__}"
        line, versions = function.__code__.co_firstlineno, (numba.__version__, llvmlite.__version__)
        self._prefix = f"{self._name}.{_digest((_stamp(source), line, versions, sys.implementation.cache_tag))[:8]}."

    @property
    def cache_path(self) -> str:
        return str(self._own)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """None: to be compiled. So is what cannot be read: no damaged file is worth a start."""
        target_context.refresh()
        name = self._file(sig, target_context.codegen())
        for folder in self._folders:
            with contextlib.suppress(Exception):
                kept_sig, code = pickle.loads(_unsealed((folder / name).read_bytes()))
                if kept_sig == sig:  # types of one name may differ
                    return CompileResult._rebuild(target_context, *code)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """What cannot be written, as on a full or read-only disk, is compiled by each process."""
        if data.lifted or data.library.has_dynamic_globals:
            return
        with contextlib.suppress(OSError):
            self._own.mkdir(parents=True, exist_ok=True)
            write_whole(self._own / self._file(sig, data.codegen), _sealed(dumps((sig, data._reduce()))))
            for file in self._own.glob(f"{glob.escape(self._name)}.*"):
                if not file.name.startswith(self._prefix):
                    file.unlink(missing_ok=True)  # of other sources

    def _file(self, sig: Any, codegen: Any) -> str:
        return f"{self._prefix}{_digest((sig, codegen.magic_tuple()))[:16]}.nbc"


def _digest(key: object) -> str:
    return hashlib.sha256(str(key).encode()).hexdigest()


def _sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def _unsealed(sealed: bytes) -> bytes:
    """Raises ValueError for what is not as it was written: damaged machine code ends the process, or counts wrong."""
    content = sealed[hashlib.sha256().digest_size :]
    if _sealed(content) != sealed:
        raise ValueError("the file is damaged")
    return content


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
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_PACKAGE.name):
            module = _PACKAGE.joinpath(*node.module.split(".")[1:])
            paths += module, *(module / name.name for name in node.names)
    files = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths)
    return tuple(file for file in files if file.exists())


def compiled(function: Function) -> Function:
    """`function` as machine code, compiled at its first call with arguments of new types."""
    return cast(Function, kept(numba.njit(error_model="numpy")(function)))


def kept(dispatcher: Any) -> Any:
    """What numba returned, with its code on disk; a plain function, as under NUMBA_DISABLE_JIT, as it is.

    Raises ValueError for a function that closes over values: its code is not that of its sources alone.
    """
    if isinstance(dispatcher, numba.core.dispatcher.Dispatcher):
        if dispatcher.py_func.__closure__:
            raise ValueError(
                f"{dispatcher.py_func.__qualname__} closes over values: define it at the top of its module"
            )
        dispatcher._cache = Cache(dispatcher.py_func)  # what `cache=True` does
    return dispatcher


def compilable(function: Function) -> Function:
    """Plain Python where Python calls it, and part of the machine code where compiled code does: for a few sums that
    are not worth a call across."""
    return cast(Function, register_jitable(function))
