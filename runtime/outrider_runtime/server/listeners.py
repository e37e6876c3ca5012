"""Opens the listening sockets before the engine starts: a port in use is reported at once, not after a model load."""

from __future__ import annotations

import errno
import socket

from outrider_runtime.server.server_errors import StartupError

MAX_PORT = 65535


def listen(host: str, port: int, flag: str) -> socket.socket:
    """Open a listening TCP socket. An empty host means every address, IPv4 and IPv6.

    Raises StartupError that names the port and `flag`, the option that changes it.
    """
    if not 0 <= port <= MAX_PORT:
        raise StartupError(f"{flag} {port} is not a port; use 0 (any free port) to {MAX_PORT}")
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise StartupError(_sentence(error, host, port, flag)) from error


def _sentence(error: OSError, host: str, port: int, flag: str) -> str:
    where = f"port {port}" + (f" of {host}" if host else "")
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; stop the process that listens there, or choose another port with {flag}"
    if error.errno == errno.EACCES:
        return f"this user may not open {where}; choose a port above 1023 with {flag}"
    return f"cannot listen on {where}: {error.strerror or error}"
