"""How a setup step runs, shows that it is alive, is locked against its twin, and fails: with a sentence."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("OUTRIDER_CACHE", "~/.cache/outrider")).expanduser()

_REPORT_EVERY_S = 10.0
_LAST_LINES = 25


class SetupError(Exception):
    """Something cannot be had here; the message is a sentence that says what, why, and what to do."""


def say(message: str) -> None:
    """Prints a line of progress."""
    print(message, file=sys.stderr, flush=True)


def run(what: str, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run a command that may take minutes; say every ten seconds that it goes on.

    Its output goes to a log next to the cache; SetupError quotes the last lines of it.
    """
    log = CACHE / "logs" / f"{what.split()[0].rstrip(':')}-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    say(f"  {what} ...")
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=cwd
            )
        except FileNotFoundError as error:
            raise SetupError(f"{what}: there is no program {command[0]!r} on this machine.") from error
        with _end_with_us(process):
            _wait(process, what, started)
    if process.returncode != 0:
        tail = "\n    ".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        raise SetupError(
            f"{what} failed ({' '.join(command[:4])} ... ended with {process.returncode}). "
            f"Its last lines, from {log}:\n    {tail}"
        )
    log.unlink()
    say(f"  {what}: done in {time.monotonic() - started:.0f} s")


def _wait(process: subprocess.Popen[bytes], what: str, started: float) -> None:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REPORT_EVERY_S)
            return
        say(f"  {what}: {time.monotonic() - started:.0f} s so far")


@contextlib.contextmanager
def _end_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def hold_lock(name: str) -> Iterator[None]:
    """Hold the cache's lock of that name: two checkouts never build one thing at once."""
    path = CACHE / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"  waiting for another run that prepares {name} ({path})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Build a folder under a temporary name and rename it, unless it is there: never half of one, also for another
    checkout."""
    if folder.exists():
        return folder
    with hold_lock(folder.name):
        if not folder.exists():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
            build(partial)
            partial.rename(folder)
    return folder
