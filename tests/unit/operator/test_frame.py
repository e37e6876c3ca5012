"""kopf as the operator sets it up, over a real connection."""

from __future__ import annotations

import logging

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kopf._cogs.clients import auth, fetching
from kopf._cogs.structs import credentials, references
from outrider_operator import frame
from outrider_operator.kinds import SERVICE
from outrider_operator.kubernetes_api import PAGE_SIZE


async def test_services_are_listed_page_by_page() -> None:
    """Ninety of 1.3 MB (their labels are bounded by nothing) in one answer took all of the operator's memory."""
    limits: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        limits.append(request.query.get("limit"))
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    settings = kopf.OperatorSettings()
    frame.configure(settings)
    kind = references.Resource(SERVICE.group, SERVICE.version, SERVICE.plural, namespaced=True)
    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    async with TestServer(application) as server:
        info = kopf.ConnectionInfo(server=str(server.make_url("")).rstrip("/"))
        vault = credentials.Vault({credentials.VaultKey("x"): info})
        auth.vault_var.set(vault)
        pages = fetching.fetch_objs(
            settings=settings, resource=kind, namespace=None, logger=logging.getLogger(__name__)
        )
        assert [version async for _, version in pages] == ["1"]
        await vault.close()
    assert limits == [str(PAGE_SIZE)]


def test_annotations_of_kopf_are_not_read() -> None:
    """A user who writes one that is no JSON had each change of that service heard a minute late."""
    settings = kopf.OperatorSettings()
    body = kopf.Body({"metadata": {"annotations": {"kopf.zalando.org/last-handled-configuration": "{bad"}}})
    with pytest.raises(ValueError, match="Expecting"):
        settings.persistence.diffbase_storage.fetch(body=body)
    frame.configure(settings)
    assert settings.persistence.diffbase_storage.fetch(body=body) is None
