"""Poll one pod's state endpoint. A tenant's process answers, so the answer may be huge, slow or endless."""

from __future__ import annotations

import os

import aiohttp
from outrider_crds.prefetch_report import PREFETCH_PATH, PrefetchProgress
from outrider_crds.runtime_config import ADMIN_PORT, STATE_PATH
from outrider_crds.runtime_state import RuntimeState

from outrider_operator.validation.invalid_input import InvalidInput
from outrider_operator.validation.reading import cut
from outrider_operator.validation.states import MOST_BYTES, prefetch_progress, runtime_state

TIMEOUT_S = 2.0
"""Timeout of the whole answer."""
CONNECTIONS = 512
"""Concurrent connections. A namespace may use only a few of them (`pod_polls.AT_ONCE`)."""
_SOURCE = "state"


class StateEndpoint:
    """Polls the states of pods over one HTTP session."""

    def __init__(self, port: int = ADMIN_PORT, timeout_s: float = TIMEOUT_S) -> None:
        self._port = port
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, address: str) -> RuntimeState | InvalidInput:
        body = await self._get(address, STATE_PATH)
        return body if isinstance(body, InvalidInput) else runtime_state(body)

    async def prefetch(self, address: str) -> PrefetchProgress | None:
        """What the pod of a prefetch Job reports; None without an answer that can be read."""
        body = await self._get(address, PREFETCH_PATH)
        return None if isinstance(body, InvalidInput) else prefetch_progress(body)

    async def _get(self, address: str, path: str) -> bytes | InvalidInput:
        host = f"[{address}]" if ":" in address else address
        try:
            # A redirect would let the pod choose an address that the operator requests.
            async with self._open().get(f"http://{host}:{self._port}{path}", allow_redirects=False) as response:
                if response.status != 200:
                    return InvalidInput(_SOURCE, "NoAnswer", f"HTTP status {response.status}")
                return await _read(response.content)
        except TimeoutError:
            return InvalidInput(_SOURCE, "TooSlow", f"no whole answer within {self._timeout.total} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return InvalidInput(_SOURCE, "NoAnswer", _message(error))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=5),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,  # a small body may unpack to gigabytes
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _message(error: Exception) -> str:
    """A sentence for a condition, without names of classes or details of the connection."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        return "the connection was cut"
    return f"no answer in HTTP ({cut(str(error) or type(error).__name__)})"


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Read to the end, or one byte beyond the limit. A single read may return only a part."""
    body = b""
    while len(body) <= MOST_BYTES and (part := await content.read(MOST_BYTES + 1 - len(body))):
        body += part
    return body
