"""A name server for the pods of LeaderWorkerSets: the test cluster has none."""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
from contextlib import suppress
from types import TracebackType

from tests.cluster.cluster import Cluster

_PORT = 53
_BAD_QUERY = (IndexError, struct.error, UnicodeDecodeError, OSError, subprocess.SubprocessError)
"""Errors of a single query: it is cut off, its sender is gone, or kubectl takes too long."""
_ADDRESS, _INTERNET, _TTL_S = 1, 1, 1
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183
"""Flags of a response: recursion is there, with and without an answer."""
_NAME_AT_12 = 0xC00C
"""A pointer to the question's name."""


class NameServer:
    """Answers POD.SERVICE.NAMESPACE by the pod's address, whether it is ready or not, as a headless Service does."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((cluster.machine_address, _PORT))
        except OSError as error:
            self._socket.close()
            raise RuntimeError(
                f"the test's name server cannot listen on {cluster.machine_address}:{_PORT} ({error}): stop the "
                "process that listens there, since pods look names up at this port alone"
            ) from error

    def __enter__(self) -> NameServer:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, sender = self._socket.recvfrom(512)
            except OSError:  # closed
                return
            with suppress(*_BAD_QUERY):
                self._socket.sendto(self._reply(query), sender)

    def _reply(self, query: bytes) -> bytes:
        labels, end = _labels(query)
        (kind,) = struct.unpack_from("!H", query, end)
        question = query[12 : end + 4]
        address = self._address(labels)
        has_answer = bool(address) and kind == _ADDRESS
        header = query[:2] + struct.pack("!HHHHH", _ANSWER if address else _NO_SUCH_NAME, 1, int(has_answer), 0, 0)
        if not has_answer:
            return header + question
        record = struct.pack("!HHHIH", _NAME_AT_12, _ADDRESS, _INTERNET, _TTL_S, 4)
        return header + question + record + socket.inet_aton(address)

    def _address(self, labels: list[str]) -> str:
        """Address of the pod with this name; empty without one."""
        if len(labels) < 3:
            return ""
        pod, _, namespace, *_ = labels
        done = self._cluster.try_kubectl("get", "pod", pod, "-n", namespace, "-o", "jsonpath={.status.podIP}")
        return str(done.stdout).strip() if done.returncode == 0 else ""


def _labels(query: bytes) -> tuple[list[str], int]:
    """Labels of the question's name, and the place after it."""
    labels, place = [], 12
    while size := query[place]:
        labels.append(query[place + 1 : place + 1 + size].decode())
        place += 1 + size
    return labels, place + 1
