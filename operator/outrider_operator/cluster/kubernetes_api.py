"""A thin asynchronous client of the API server with plain dictionaries as input and output.

It uses the transport and configuration of the official client (`kubernetes.aio`), but not its generated API classes:
importing them takes 110 MB, most of the operator's memory budget.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from outrider_operator.cluster.api_error import UNREACHABLE, ApiError, error_of
from outrider_operator.cluster_model import FIELD_MANAGER, Object
from outrider_operator.kinds import UNWATCHED_CHILDREN, WATCHED_BY_METADATA, ResourceKind, kind_of
from outrider_operator.operator_metrics import telemetry
from outrider_operator.validation.reading import InvalidInput, name_of, namespace_of

logger = logging.getLogger(__name__)

PAGE_SIZE = 25
MOST_PAGE = 4 * 1024 * 1024
"""Bytes in a page of a list, which is read into memory as a whole. One object may take 1.5 MB."""
MOST_EVENT = 4 * 1024 * 1024
"""Bytes in an event of a watch. An object may take more, since JSON escapes `<` by six bytes."""
WATCH_TIMEOUT_S = 240
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30)
# A page may have megabytes. On a slow network it must not start again and again: it fails only if no data arrives.
_PAGE_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=10, sock_read=30)
# The server gives up on slow webhooks after a minute, and its answer names the slow one.
_WRITE_TIMEOUT = aiohttp.ClientTimeout(total=65, sock_connect=10)
# The server sends a bookmark about every minute, so a stream without data for much longer is dead.
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=WATCH_TIMEOUT_S + 30, sock_read=150)
APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
"""Content type of server-side apply. Without the character set the client would encode the document as JSON."""
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
MERGE_PATCH = "application/merge-patch+json"
"""JSON merge patch, the only kind of merge that custom resources know."""
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_MANAGER = ("fieldManager", FIELD_MANAGER)
_STRICT = ("fieldValidation", "Strict")
_SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


@dataclass(frozen=True)
class Page:
    """One page of a list."""

    objects: list[Object]
    version: str
    """Resource version of the whole list."""


async def load_configuration() -> Configuration:
    """Address and credentials of the cluster: from the service account in a pod, else from the kubeconfig."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = 0  # no limit: each watch uses one, and there may be many namespaces
    if _SERVICE_ACCOUNT_TOKEN.exists():
        load_incluster_config(client_configuration=configuration)
    else:
        await load_kube_config(client_configuration=configuration, persist_config=False)
    return configuration


class KubernetesApi:
    """Requests to the API server. Each raises ApiError if it is refused, or one of UNREACHABLE."""

    def __init__(self, configuration: Configuration) -> None:
        # Proxies of the environment are not used: Python does not support networks in NO_PROXY, and the API server's
        # address is inside the cluster. A kubeconfig's own proxy-url is used.
        configuration.client_session_kwargs = {"trust_env": False}
        self._client = ApiClient(configuration)
        self._client.user_agent = "outrider-operator"

    async def close(self) -> None:
        await self._client.close()

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> Object | None:
        """The object; None if it does not exist."""
        try:
            return await self._request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def pages(
        self, kind: ResourceKind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncGenerator[Page, None]:
        """The selected objects (of some kinds only metadata) page by page. Large objects come in smaller pages."""
        token, size = "", PAGE_SIZE
        while True:
            query = [("labelSelector", selector), ("fieldSelector", fields), ("continue", token), ("limit", str(size))]
            body = await self._page(kind, namespace, query, MOST_PAGE if size > 1 else None)
            if body is None:
                size = max(1, size // 5)
                continue
            page = json.loads(body)
            del body
            yield Page(page.get("items") or [], page["metadata"]["resourceVersion"])
            token, size = page["metadata"].get("continue", ""), min(PAGE_SIZE, 5 * size)
            if not token:
                return

    async def _page(
        self, kind: ResourceKind, namespace: str | None, query: list[tuple[str, str]], most: int | None
    ) -> bytes | None:
        """The body of one page; None if it exceeds `most` bytes."""
        accept = _METADATA_LIST if kind in WATCHED_BY_METADATA else _JSON
        async with await self._send(
            "GET", kind.path(namespace), query=query, accept=accept, timeout=_PAGE_TIMEOUT
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if most is not None and len(body) > most:
                    response.close()
                    return None
        return bytes(body)

    async def some(
        self, kind: ResourceKind, namespace: str | None, *, fields: str = "", pages: int = 1
    ) -> list[Object]:
        """The objects of a field selector on the first `pages`."""
        objects: list[Object] = []
        async with aclosing(self.pages(kind, namespace, fields=fields)) as all_pages:
            async for page in all_pages:
                objects += page.objects
                pages -= 1
                if not pages:
                    break
        return objects

    async def watch(
        self, kind: ResourceKind, namespace: str | None, selector: str, resource_version: str
    ) -> AsyncIterator[tuple[str, Object] | InvalidInput]:
        """Events (type, object) after `resource_version`, until the server ends the stream after some minutes.

        InvalidInput replaces an event that is too large. Raises ValueError or KeyError for a malformed event.
        """
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("labelSelector", selector),
            ("resourceVersion", resource_version),
            ("timeoutSeconds", str(WATCH_TIMEOUT_S)),
        ]
        accept = _METADATA if kind in WATCHED_BY_METADATA else _JSON
        response = await self._send("GET", kind.path(namespace), query=query, timeout=_WATCH_TIMEOUT, accept=accept)
        try:
            async for line in _lines(response.content):
                if line is None:
                    yield InvalidInput(
                        "object", "TooLarge", f"an event of {kind.plural} has more than {MOST_EVENT} bytes"
                    )
                    continue
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise error_of(event["object"].get("code", 500), json.dumps(event["object"]))
                yield event["type"], event["object"]
        finally:
            response.close()

    async def apply(self, document: Object) -> Object:
        """Server-side apply. Outrider's fields win, fields of others stay, unknown fields are refused."""
        query = (_MANAGER, ("force", "true"), _STRICT)
        return await self._write("apply", document, "PATCH", yaml_text(document), query=query, content_type=APPLY_PATCH)

    async def create(self, document: Object) -> Object:
        return await self._write("create", document, "POST", document, query=(_MANAGER, _STRICT))

    async def patch(self, patch: Object) -> Object:
        """Merge of `patch` into the object that it names. metadata.uid in it is a precondition.

        Returns the object as a watch would report it.
        """
        accept = _METADATA if kind_of(patch) in WATCHED_BY_METADATA else _JSON
        content_type = MERGE_PATCH if kind_of(patch) in UNWATCHED_CHILDREN else STRATEGIC_PATCH
        return await self._write("patch", patch, "PATCH", patch, content_type=content_type, accept=accept)

    async def delete(self, document: Object, preconditions: dict[str, str]) -> Object | None:
        """Delete the object if `preconditions` (uid, resourceVersion) hold. Objects that it owns go in the background.

        Returns None if it is gone, or the terminating object if finalizers delay that.
        """
        options = {"propagationPolicy": "Background", "preconditions": preconditions}
        answer = await self._write("delete", document, "DELETE", options, query=())
        return answer if (answer.get("metadata") or {}).get("finalizers") else None

    async def replace(self, document: Object, subresource: str | None = None) -> Object:
        """Replace the object (or its status) if it still has the resource version of `document`."""
        verb = f"update {subresource or ''}".strip()
        return await self._write(verb, document, "PUT", document, subresource=subresource)

    async def serves(self, kind: ResourceKind) -> bool:
        """True if the API server knows the kind, that is its CustomResourceDefinition is installed."""
        try:
            group = await self._request("GET", f"/apis/{kind.api_version}")
        except ApiError as error:
            if error.not_found:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in group["resources"])

    async def _write(
        self, verb: str, document: Object, method: str, body: Any, *, subresource: str | None = None, **options: Any
    ) -> Object:
        telemetry.WRITES.labels(verb=verb, kind=document["kind"]).inc()
        name = None if method == "POST" else name_of(document)
        path = kind_of(document).path(namespace_of(document), name, subresource)
        return await self._request(
            method, path, **{"body": body, "timeout": _WRITE_TIMEOUT, "query": (_MANAGER,), **options}
        )

    async def _request(self, method: str, path: str, **options: Any) -> Object:
        response = await self._send(method, path, **options)
        async with response:
            document: Object = await response.json()
        return document

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Iterable[tuple[str, str]] = (),
        content_type: str = _JSON,
        accept: str = _JSON,
        timeout: aiohttp.ClientTimeout = _REQUEST_TIMEOUT,
    ) -> aiohttp.ClientResponse:
        parameters = [(name, value) for name, value in query if value]
        request = await self._client.param_serialize(
            method,
            path,
            query_params=parameters,
            header_params={"Accept": accept, "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*request, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        if response.status >= 400:
            raise error_of(response.status, await response.text())
        return response


async def some_if_possible(
    api: KubernetesApi, kind: ResourceKind, namespace: str, *, fields: str = "", pages: int = 1
) -> list[Object] | None:
    """Objects on the first `pages`; None on an error: a better sentence is not worth a failed reconcile."""
    try:
        return await api.some(kind, namespace, fields=fields, pages=pages)
    except (ApiError, *UNREACHABLE) as error:
        logger.warning("Cannot read the %s of %s: %r", kind.plural, namespace, error)
        return None


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes | None]:
    """The lines of a stream. None replaces a line that is too large, which is never in memory as a whole."""
    line, size = bytearray(), 0
    async for chunk in content.iter_any():
        for part in chunk.splitlines(keepends=True):
            size += len(part)
            if size <= MOST_EVENT:
                line += part
            if part.endswith(b"\n"):
                yield bytes(line) if size <= MOST_EVENT else None
                line, size = bytearray(), 0
    if size:
        yield bytes(line)  # the stream ended within a line


def yaml_text(document: Object) -> str:
    """`document` as YAML for a server-side apply.

    YAML does not know JSON's escapes of characters beyond U+FFFF, so an annotation with an emoji could not be applied.
    """
    text = json.dumps(document, ensure_ascii=False)
    return re.sub(r"[^\x20-\x7e]", lambda match: f"\\U{ord(match[0]):08x}", text)
