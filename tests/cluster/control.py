"""How the machine talks to a cluster's supervisor: JSON lines over a socket in the state folder.

A request is one line; the reply is any number of {"progress": ...} lines and one {"result": ...} or
{"error": ...}. Socket paths may have 107 bytes only, so both ends go through the folder's descriptor.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster.errors import ClusterError

Reply = dict[str, Any]


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """The supervisor's end."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short_path(path) as address:
        server.bind(address)
    server.listen(8)
    return server


def connect(path: Path, wait_s: float = 0.0) -> socket.socket:
    """The machine's end; for `wait_s` a socket that is not there yet is waited for."""
    deadline = time.monotonic() + wait_s
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_path(path) as address:
                client.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            client.close()
            if time.monotonic() >= deadline:
                raise ClusterError(f"No cluster answers at {path}: it was not started, or it is gone.") from error
            time.sleep(0.02)
        else:
            return client


def ask(path: Path, request: Reply, progress: Callable[[str], None], wait_s: float = 0.0) -> Any:
    """Send one request and wait for its result; ClusterError carries the supervisor's own sentence."""
    with connect(path, wait_s) as client, client.makefile("rw") as stream:
        stream.write(json.dumps(request) + "\n")
        stream.flush()
        for line in stream:
            reply = json.loads(line)
            if "progress" in reply:
                progress(reply["progress"])
            elif "error" in reply:
                raise ClusterError(reply["error"])
            else:
                return reply["result"]
    raise ClusterError(f"The cluster ended while it was asked to {request['do']!r}; see {path.parent / 'logs'}.")
