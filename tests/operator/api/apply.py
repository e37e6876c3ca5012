"""A manifest's text sent to the API server, as `kubectl create --dry-run=server` sends it.

One connection for the whole corpus: a process of kubectl for each manifest would take a minute.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from kubernetes import config
from outrider_operator.cluster.kubernetes_api import APPLY_PATCH, yaml_text
from outrider_operator.kinds import kind_of
from outrider_operator.validation.reading import name_of

NAMESPACE = "corpus"
_PATH = f"/apis/outrider.dev/v1alpha1/namespaces/{NAMESPACE}/speculativeservices"
_QUERY = {"dryRun": "All", "fieldManager": "corpus", "fieldValidation": "Strict"}
_YAML = "application/yaml"


@dataclass(frozen=True)
class Refused:
    message: str


class ApiServer:
    """The API server that a kubeconfig names."""

    def __init__(self, kubeconfig: str) -> None:
        self._client = config.new_client_from_config(kubeconfig)

    def dry_run(self, text: str) -> dict[str, Any] | Refused:
        """The object as it would be stored, or why it would not."""
        return self._send("POST", _PATH, _YAML, text)

    def dry_run_child(self, child: dict[str, Any]) -> dict[str, Any] | Refused:
        """Dry-run an object of the operator by server-side apply, as the operator sends it."""
        path = kind_of(child).path(NAMESPACE, name_of(child))
        return self._send("PATCH", path, APPLY_PATCH, yaml_text(child), force="true")

    def _send(self, method: str, path: str, content: str, text: str, **query: str) -> dict[str, Any] | Refused:
        url = f"{self._client.configuration.host}{path}?{urlencode({**_QUERY, **query})}"
        headers = {"Content-Type": content, "Accept": "application/json"}
        answer = self._client.call_api(method, url, header_params=headers, body=text.encode())
        answer.read()
        document: dict[str, Any] = json.loads(answer.data)
        return Refused(document["message"]) if answer.status >= 300 else document
