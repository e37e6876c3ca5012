"""A thin asynchronous client of the API server: plain dictionaries in and out.

It stands on the official client's transport and configuration (`kubernetes.aio`), not on its generated API
classes: importing those takes 110 MB, most of the operator's memory budget.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from outrider_operator import telemetry
from outrider_operator.inbound.reading import items, name_of, namespace_of, text
from outrider_operator.inbound.unfit import Unfit
from outrider_operator.kinds import WATCHED_BY_METADATA, Kind, kind_of
from outrider_operator.model import FIELD_MANAGER, Object

PAGE_SIZE = 25
MOST_PAGE = 4 * 1024 * 1024
"""Bytes in a page of a list, which is in memory as a whole: an object may weigh 1.5 MB, whoever made it."""
MOST_EVENT = 4 * 1024 * 1024
"""Bytes in an event of a watch. An object may take more: JSON spells a `<` in six."""
WATCH_TIMEOUT_S = 240
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30)
# A page may have megabytes, and a slow network is no reason to begin it anew, for ever: it ends where nothing comes.
_PAGE_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=10, sock_read=30)
# The server gives up after a minute, whatever its webhooks take: it answers then, and names the one that was slow.
_WRITE_TIMEOUT = aiohttp.ClientTimeout(total=65, sock_connect=10)
# The server sends a bookmark about every minute: a stream that is silent for much longer is dead.
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=WATCH_TIMEOUT_S + 30, sock_read=150)
APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
"""With the character set: without it the client would write the document itself, as JSON."""
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_DENIED = "admission webhook"
"""How the message of a denial begins. The webhook may choose any status for it: one of a busy server, or a 404."""
_STRICT = ("fieldValidation", "Strict")
_SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class ApiError(Exception):
    """The API server refused a request: its HTTP status, reason and sentence."""

    def __init__(self, status: int, reason: str, message: str, causes: frozenset[str] = frozenset()) -> None:
        """causes: reasons of `details.causes`."""
        super().__init__(f"{reason or 'error'} ({status}): {message}")
        self.causes = causes
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def already_exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def conflict(self) -> bool:
        """Another wrote first, or a precondition does not hold."""
        return self.status == 409 and self.reason == "Conflict"

    @property
    def expired(self) -> bool:
        """The resource version is too old to watch from: list again."""
        return self.status == 410

    @property
    def forbidden(self) -> bool:
        return self.status == 403

    @property
    def namespace_ends(self) -> bool:
        """The namespace is being deleted: nothing can be made in it any more, and all that is there goes."""
        return "NamespaceTerminating" in self.causes

    @property
    def busy(self) -> bool:
        """The server asks to come back later, whatever the request was."""
        return self.status in (429, 503)


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    objects: list[Object]
    version: str
    """Resource version of the whole list."""


UNREACHABLE = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""What a request raises when the API server cannot be reached."""


async def load_configuration() -> Configuration:
    """The cluster's address and credentials: the service account's in a pod, else the kubeconfig's."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = 0  # no limit: every watch holds a connection, and namespaces may be many
    if _SERVICE_ACCOUNT_TOKEN.exists():
        load_incluster_config(client_configuration=configuration)
    else:
        await load_kube_config(client_configuration=configuration, persist_config=False)
    return configuration


class KubernetesApi:
    """Requests to the API server. Where it does not answer as asked, each raises ApiError or one of UNREACHABLE."""

    def __init__(self, configuration: Configuration) -> None:
        # Never through a proxy of the environment: Python knows no networks in NO_PROXY, and the API server's address
        # is one of the cluster's. A kubeconfig's own proxy-url is used.
        configuration.client_session_kwargs = {"trust_env": False}
        self._client = ApiClient(configuration)
        self._client.user_agent = "outrider-operator"

    async def close(self) -> None:
        await self._client.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            return await self._request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncGenerator[Page, None]:
        """The objects of the selectors (of some kinds their metadata), page by page; large ones in smaller pages."""
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
        self, kind: Kind, namespace: str | None, query: list[tuple[str, str]], most: int | None
    ) -> bytes | None:
        """The body of one page; None when it has more than `most` bytes, which are not read."""
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

    async def some(self, kind: Kind, namespace: str | None, *, fields: str = "", pages: int = 1) -> list[Object]:
        """The objects (of a field selector) on the first `pages`, where those are enough."""
        found: list[Object] = []
        async with aclosing(self.pages(kind, namespace, fields=fields)) as all_pages:
            async for page in all_pages:
                found += page.objects
                pages -= 1
                if not pages:
                    break
        return found

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, resource_version: str
    ) -> AsyncIterator[tuple[str, Object] | Unfit]:
        """Events (type, object) after `resource_version`, until the server ends the stream after some minutes.

        Unfit takes the place of an event that is too large. Raises ValueError or KeyError for what is no event.
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
                    yield Unfit("object", "TooLarge", f"an event of {kind.plural} has more than {MOST_EVENT} bytes")
                    continue
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(event["object"].get("code", 500), json.dumps(event["object"]))
                yield event["type"], event["object"]
        finally:
            response.close()

    async def apply(self, document: Object) -> Object:
        """Server-side apply: fields that Outrider sets win, those that others added stay, unknown ones are refused."""
        path = kind_of(document).path(namespace_of(document), name_of(document))
        query = [("fieldManager", FIELD_MANAGER), ("force", "true"), _STRICT]
        return await self._write(
            "apply", document, "PATCH", path, yaml_text(document), query=query, content_type=APPLY_PATCH
        )

    async def create(self, document: Object) -> Object:
        path = kind_of(document).path(namespace_of(document))
        query = [("fieldManager", FIELD_MANAGER), _STRICT]
        return await self._write("create", document, "POST", path, document, query=query)

    async def patch(self, patch: Object) -> Object:
        """Strategic merge of `patch`, which names its object; with metadata.uid in it, of exactly that object.

        Returns what a watch would report of it.
        """
        path = kind_of(patch).path(namespace_of(patch), name_of(patch))
        query = [("fieldManager", FIELD_MANAGER)]
        accept = _METADATA if kind_of(patch) in WATCHED_BY_METADATA else _JSON
        return await self._write(
            "patch", patch, "PATCH", path, patch, query=query, content_type=STRATEGIC_PATCH, accept=accept
        )

    async def delete(self, document: Object, preconditions: dict[str, str]) -> Object | None:
        """Delete the object if `preconditions` (uid, resourceVersion) hold and, in the background, what it owns.

        None when it is gone; else the object as it is being deleted (it has finalizers).
        """
        path = kind_of(document).path(namespace_of(document), name_of(document))
        options = {"propagationPolicy": "Background", "preconditions": preconditions}
        answer = await self._write("delete", document, "DELETE", path, options)
        return answer if (answer.get("metadata") or {}).get("finalizers") else None

    async def replace(self, document: Object, subresource: str | None = None) -> Object:
        """Replace the object (or its status) if it still has the resource version that `document` carries."""
        path = kind_of(document).path(namespace_of(document), name_of(document), subresource)
        query = [("fieldManager", FIELD_MANAGER)]
        return await self._write(f"update {subresource or ''}".strip(), document, "PUT", path, document, query=query)

    async def serves(self, kind: Kind) -> bool:
        """True where the API server knows the kind (its CustomResourceDefinition is installed)."""
        try:
            group = await self._request("GET", f"/apis/{kind.api_version}")
        except ApiError as error:
            if error.not_found:
                return False
            raise
        return any(resource["name"] == kind.plural for resource in group["resources"])

    async def _write(self, verb: str, document: Object, method: str, path: str, body: Any, **options: Any) -> Object:
        telemetry.WRITES.labels(verb=verb, kind=document["kind"]).inc()
        return await self._request(method, path, body=body, timeout=_WRITE_TIMEOUT, **options)

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
        query: list[tuple[str, str]] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        timeout: aiohttp.ClientTimeout = _REQUEST_TIMEOUT,
    ) -> aiohttp.ClientResponse:
        parameters = [(name, value) for name, value in query or [] if value]
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
            raise _error(response.status, await response.text())
        return response


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes | None]:
    """The lines of a stream; None in place of one that is too large, of which no more than the limit is in memory."""
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
        yield bytes(line)  # cut off


def yaml_text(document: Object) -> str:
    """`document` for a server-side apply, which is read as YAML.

    JSON's escapes of characters beyond U+FFFF are none of YAML's: an annotation with an emoji could not be applied.
    """
    text = json.dumps(document, ensure_ascii=False)
    return re.sub(r"[^\x20-\x7e]", lambda match: f"\\U{ord(match[0]):08x}", text)


def _error(status: int, body: str) -> ApiError:
    """The API server answers with a `Status` document; a proxy in front of it may answer with anything."""
    try:
        document = json.loads(body)
        reason, message = str(document.get("reason", "")), str(document.get("message", ""))
        causes = frozenset(text(cause, "reason") for cause in items(document, "details", "causes"))
    except (ValueError, AttributeError):
        return ApiError(status, "", body[:200])
    if message.startswith(_DENIED):
        return ApiError(403, "Forbidden", message)
    return ApiError(status, reason, message, causes)
