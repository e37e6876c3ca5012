"""Keeps the cluster's NetworkPolicies in force: a process of the cluster, started by its supervisor.

Usage: python -m tests.cluster.enforcer STATE SERVER
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.cluster import certificates
from tests.cluster.layout import Layout
from tests.cluster.network_policies import World, ruleset
from tests.cluster.processes import run

POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
PODS = "/api/v1/pods"
NAMESPACES = "/api/v1/namespaces"
_RETRY_S = 1.0
_GATHER_S = 0.1
"""Changes come in groups; one rule set answers a group."""


class Store:
    """The objects of one collection, as the API server last reported them. The rules hold while it is down."""

    def __init__(self, server: str, path: str, opener: urllib.request.OpenerDirector, changed: threading.Event) -> None:
        self._url = server + path
        self._opener = opener
        self._changed = changed
        self._objects: dict[str, Any] = {}  # by uid
        self.listed = False

    def objects(self) -> list[Any]:
        return list(self._objects.values())

    def follow(self) -> None:
        """List, then watch, for ever."""
        while True:
            try:
                self._watch(self._list())
            except (OSError, http.client.HTTPException, ValueError) as error:
                print(f"{self._url}: again after {error!r}", flush=True)
            time.sleep(_RETRY_S)

    def _list(self) -> str:
        with self._opener.open(self._url, timeout=30) as answer:
            document = json.load(answer)
        self._objects = {item["metadata"]["uid"]: item for item in document["items"]}
        self.listed = True
        self._changed.set()
        return str(document["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> None:
        with self._opener.open(f"{self._url}?watch=1&resourceVersion={version}", timeout=3600) as answer:
            for line in answer:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ValueError(event["object"])  # the version is too old: list again
                uid = event["object"]["metadata"]["uid"]
                if event["type"] == "DELETED":
                    self._objects = {known: kept for known, kept in self._objects.items() if known != uid}
                else:
                    self._objects = {**self._objects, uid: event["object"]}
                self._changed.set()


def main() -> None:
    """Writes the rules again whenever a policy, a pod or a namespace has changed."""
    layout, server = Layout(Path(sys.argv[1])), sys.argv[2]
    changed = threading.Event()
    opener = certificates.opener(layout)
    policies, pods, namespaces = (Store(server, path, opener, changed) for path in (POLICIES, PODS, NAMESPACES))
    stores = (policies, pods, namespaces)
    for store in stores:
        threading.Thread(target=store.follow, daemon=True).start()
    in_force = ""
    while True:
        changed.wait()
        time.sleep(_GATHER_S)
        changed.clear()
        if not all(store.listed for store in stores):
            continue
        rules = ruleset(World(policies.objects(), pods.objects(), namespaces.objects()))
        if rules != in_force:
            run(["nft", "-f", "-"], stdin=rules)
            in_force = rules


if __name__ == "__main__":
    main()
