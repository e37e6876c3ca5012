"""Decide which addresses are reached directly although the environment names a proxy (HTTPS_PROXY)."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit


def is_internal(url: str) -> bool:
    """True if every address of the URL's host is private: a Service, a pod, or a host of the same network.

    NO_PROXY is not enough: Python compares it as text, so neither 10.0.0.0/8 nor a Service's short name matches. A host
    that cannot be resolved here counts as external. Blocks while the name is resolved.
    """
    try:
        addresses = socket.getaddrinfo(urlsplit(url).hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(not ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in addresses)
