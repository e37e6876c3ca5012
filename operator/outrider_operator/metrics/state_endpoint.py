"""One question to one pod's state endpoint. What answers is a tenant's process: it may be huge, slow or endless."""

from __future__ import annotations

import os

import aiohttp
from outrider_crds.runtime_config import ADMIN_PORT, STATE_PATH
from outrider_crds.state import RuntimeState

from outrider_operator.inbound.reading import cut
from outrider_operator.inbound.states import MOST_BYTES, runtime_state
from outrider_operator.inbound.unfit import Unfit

TIMEOUT_S = 2.0
"""For the whole answer, however it drips."""
CONNECTIONS = 512
"""At once. A namespace may have a few of them only (`pods.AT_ONCE`): slow pods of many hold up no other's."""
_SOURCE = "state"


class StateEndpoint:
    """Asks pods for their states over one HTTP session."""

    def __init__(self, port: int = ADMIN_PORT, timeout_s: float = TIMEOUT_S) -> None:
        self._port = port
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, address: str) -> RuntimeState | Unfit:
        host = f"[{address}]" if ":" in address else address
        try:
            # A redirect would have the operator ask an address of the pod's choice.
            async with self._open().get(f"http://{host}:{self._port}{STATE_PATH}", allow_redirects=False) as response:
                if response.status != 200:
                    return Unfit(_SOURCE, "NoAnswer", f"HTTP status {response.status}")
                body = await _read(response.content)
        except TimeoutError:
            return Unfit(_SOURCE, "TooSlow", f"no whole answer within {self._timeout.total} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Unfit(_SOURCE, "NoAnswer", _in_words(error))
        return runtime_state(body)

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


def _in_words(error: Exception) -> str:
    """It stands in a condition: no name of a class, no setting of a connection."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    if isinstance(error, aiohttp.ServerDisconnectedError | ConnectionError):
        return "the connection was cut"
    return f"no answer in HTTP ({cut(str(error) or type(error).__name__)})"


async def _read(content: aiohttp.StreamReader) -> bytes:
    """To the end, or one byte beyond the limit: a read returns what has arrived, which may be a part."""
    body = b""
    while len(body) <= MOST_BYTES and (part := await content.read(MOST_BYTES + 1 - len(body))):
        body += part
    return body
