"""A manifest's text sent to the API server, as `kubectl create --dry-run=server` sends it.

One connection for the whole corpus: a process of kubectl for each manifest would take a minute.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from kubernetes import config

NAMESPACE = "corpus"
_PATH = f"/apis/outrider.dev/v1alpha1/namespaces/{NAMESPACE}/speculativeservices"
_QUERY = urlencode({"dryRun": "All", "fieldManager": "corpus", "fieldValidation": "Strict"})
_HEADERS = {"Content-Type": "application/yaml", "Accept": "application/json"}


@dataclass(frozen=True)
class Refused:
    message: str


class ApiServer:
    """The API server that a kubeconfig names."""

    def __init__(self, kubeconfig: str) -> None:
        self._client = config.new_client_from_config(kubeconfig)

    def dry_run(self, text: str) -> dict[str, Any] | Refused:
        """The object as it would be stored, or why it would not."""
        url = f"{self._client.configuration.host}{_PATH}?{_QUERY}"
        answer = self._client.call_api("POST", url, header_params=dict(_HEADERS), body=text.encode())
        answer.read()
        document: dict[str, Any] = json.loads(answer.data)
        return Refused(document["message"]) if answer.status >= 300 else document
