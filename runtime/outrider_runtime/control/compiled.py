"""numba with types: hot functions are plain loops, compiled once; their machine code is kept on disk.

It is written next to its source, or into NUMBA_CACHE_DIR if that is set (for a read-only image), and read from both.
Images are built with it (`python -m outrider_runtime.loop.compile_loop`), so that no pod compiles.
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
from numba.core import cgutils, types
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.extending import intrinsic, overload, register_jitable

from outrider_runtime.processor import portable_cpu_variables
from outrider_runtime.whole_file import write_whole

Function = TypeVar("Function", bound=Callable[..., object])

_PACKAGE = Path(__file__).parents[1]

os.environ.update(portable_cpu_variables(os.environ))  # before numba starts; it reads the environment again later
numba.config.reload_config()


class Cache(NullCache):  # type: ignore[misc]  # numba has no types
    """Machine code on disk: a file for each function, state of its sources, and types of its arguments.

    numba's own cache only compares the modification time of a function's own file. It misses changes of functions that
    are compiled into it, and a copied image has other times. Its file names are the same in all releases, so that
    processes which save at the same time, or a full disk, can leave one release's code under another's index.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        source = Path(inspect.getfile(function))
        next_to_source = source.parent / "__pycache__"
        self._own = Path(numba.config.CACHE_DIR) if numba.config.CACHE_DIR else next_to_source
        self._folders = dict.fromkeys((next_to_source, self._own))
        self._name = f"{function.__module__}.{function.__qualname__}"
        line, versions = function.__code__.co_firstlineno, (numba.__version__, llvmlite.__version__)
        self._prefix = f"{self._name}.{_digest((_stamp(source), line, versions, sys.implementation.cache_tag))[:8]}."

    @property
    def cache_path(self) -> str:
        return str(self._own)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code from disk; None: compile it. A file that cannot be read is ignored: it must not prevent a start."""
        target_context.refresh()
        name = self._file(sig, target_context.codegen())
        for folder in self._folders:
            with contextlib.suppress(Exception):
                kept_sig, code = pickle.loads(_unsealed((folder / name).read_bytes()))
                if kept_sig == sig:  # types of one name may differ
                    return CompileResult._rebuild(target_context, *code)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the code to disk. If that fails, as on a full or read-only disk, each process compiles it."""
        if data.lifted or data.library.has_dynamic_globals:
            return
        with contextlib.suppress(OSError):
            self._own.mkdir(parents=True, exist_ok=True)
            write_whole(self._own / self._file(sig, data.codegen), _sealed(dumps((sig, data._reduce()))))
            for file in self._own.glob(f"{glob.escape(self._name)}.*"):
                if not file.name.startswith(self._prefix):
                    file.unlink(missing_ok=True)  # code of other sources

    def _file(self, sig: Any, codegen: Any) -> str:
        return f"{self._prefix}{_digest((sig, codegen.magic_tuple()))[:16]}.nbc"


def _digest(key: object) -> str:
    return hashlib.sha256(str(key).encode()).hexdigest()


def _sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def _unsealed(sealed: bytes) -> bytes:
    """The content of a sealed file. Raises ValueError if it is not as it was written: damaged machine code would crash
    the process, or compute wrong numbers."""
    content = sealed[hashlib.sha256().digest_size :]
    if _sealed(content) != sealed:
        raise ValueError("the file is damaged")
    return content


@functools.cache
def _stamp(source: Path) -> str:
    """Hash of all sources that this source's machine code may hold parts of."""
    sources, todo = set[Path](), [source]
    while todo:
        file = todo.pop()
        todo += () if file in sources else _imported(file)
        sources.add(file)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()


@functools.cache
def _imported(source: Path) -> tuple[Path, ...]:
    """Files of Outrider's own that a file imports from at its top: the compiled code may use these."""
    paths = list[Path]()
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("outrider_"):
            module = _PACKAGE.parent.joinpath(*node.module.split("."))
            paths += module, *(module / name.name for name in node.names)
    files = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths)
    return tuple(file for file in files if file.exists())


def compiled(function: Function) -> Function:
    """Turn `function` into machine code, at its first call with arguments of new types."""
    return cast(Function, kept(numba.njit(error_model="numpy")(function)))


def kept(dispatcher: Any) -> Any:
    """Keep the code of what numba returned on disk. A plain function, as under NUMBA_DISABLE_JIT, is left as it is.

    Raises ValueError for a function that closes over values: its code depends on more than its sources.
    """
    if isinstance(dispatcher, numba.core.dispatcher.Dispatcher):
        if dispatcher.py_func.__closure__:
            raise ValueError(
                f"{dispatcher.py_func.__qualname__} closes over values: define it at the top of its module"
            )
        dispatcher._cache = Cache(dispatcher.py_func)  # as `cache=True` does
    return dispatcher


def compilable(function: Function) -> Function:
    """Leave `function` as plain Python for callers in Python, and inline it into compiled callers: for small sums that
    are not worth a call into compiled code."""
    return cast(Function, register_jitable(function))


Value = TypeVar("Value")


def borrowed(value: Value) -> Value:
    """Return `value`, a tuple or an array, with arrays that own no memory.

    Compiled code counts references at each call that takes or returns an array, with an atomic operation for each array
    of a tuple: most of the time of a decision about a few requests. The caller keeps the arrays alive, and returns none
    of them. In plain Python this is `value` itself.
    """
    return value


def keep_alive(value: object) -> None:
    """Use `value` here, so that compiled code does not free it before."""


@intrinsic  # type: ignore[untyped-decorator]
def _used(_typing: Any, value: Any) -> Any:
    return types.void(value), lambda context, *_: context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _without_owner(_typing: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _disowned(context, builder, value, arguments[0])

    return value(value), generate


def _disowned(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The code's value of type `kind` with null as the owner of each array.

    Raises TypeError for a type whose owner is another: such a value would be freed without having been counted."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for index, part in enumerate(kind):
            member = _disowned(context, builder, part, builder.extract_value(value, index))
            value = builder.insert_value(value, member, index)
    elif not isinstance(kind, types.Number | types.Boolean):
        raise TypeError(f"a value of type {kind} cannot be borrowed: arrays, tuples and numbers can")
    return value


# Not decorators: numba compares the signatures of both functions, annotations included.
overload(borrowed)(lambda value: lambda value: _without_owner(value))  # noqa: ARG005
overload(keep_alive)(lambda value: lambda value: _used(value))  # noqa: ARG005
