"""Which addresses are reached directly where the environment names a proxy (HTTPS_PROXY)."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_internal(url: str) -> bool:
    """True where every address of the URL's host is private: a Service, a pod, a host of the same network.

    NO_PROXY cannot say it: Python compares it as text, so 10.0.0.0/8 matches nothing, nor does a Service's short name.
    A host that has no address here is the proxy's to find. Blocks while the name is looked up.
    """
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(not ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in found)
