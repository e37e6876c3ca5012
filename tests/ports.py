"""Ports for processes that tests start."""

from __future__ import annotations

import itertools
import random
import socket

_PORTS = range(20_000, 30_000)
"""A port below those that the kernel gives to outgoing connections and Kubernetes to NodePorts: a free one is
still free when the process binds it, a second time too."""
_places = itertools.count(random.randrange(len(_PORTS)))


def free_port() -> int:
    """Return another port at each call. Processes start at different ports, so that they rarely try the same."""
    while True:
        port = _PORTS[next(_places) % len(_PORTS)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
