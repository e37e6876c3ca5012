"""Users of the cluster: a certificate, made by the Go program next to this file, and a kubeconfig for each."""

from __future__ import annotations

import json
import ssl
import urllib.request
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.layout import Layout
from tests.cluster.processes import run
from tests.cluster.spec import NodeSpec
from tests.cluster.subnets import Subnets

ADMIN = "admin"
API_SERVER = "kube-apiserver"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
PROXY = "kube-proxy"
FRONT_PROXY = "front-proxy"
SERVICE_ACCOUNTS = "service-accounts"
"""Only its key is used: it signs the tokens of service accounts."""


def sign_control_plane(layout: Layout, binaries: Path, subnets: Subnets) -> None:
    """The API server's own certificate and those of its clients."""
    server = {
        "name": API_SERVER,
        "commonName": "kube-apiserver-kubelet-client",
        "organization": ["system:masters"],  # it is also what the API server shows to kubelets
        "addresses": [str(subnets.node(0)), str(subnets.kubernetes_service), "127.0.0.1"],
        "hosts": ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"],
    }
    clients = [
        _client(ADMIN, "outrider-test-admin", "system:masters"),
        _client(CONTROLLER_MANAGER, "system:kube-controller-manager"),
        _client(SCHEDULER, "system:kube-scheduler"),
        _client(PROXY, "system:kube-proxy"),
        _client(FRONT_PROXY, "front-proxy-client"),
        _client(SERVICE_ACCOUNTS, "service-accounts"),
    ]
    _sign(layout, binaries, [server, *clients])
    for name in (CONTROLLER_MANAGER, SCHEDULER, PROXY):
        write_kubeconfig(layout.component_kubeconfig(name), layout, name, subnets)
    write_kubeconfig(layout.kubeconfig, layout, ADMIN, subnets)


def sign_node(layout: Layout, binaries: Path, subnets: Subnets, node: NodeSpec) -> None:
    """A kubelet's certificate, client and server in one: it carries the node's address."""
    request = _client(node.name, f"system:node:{node.name}", "system:nodes")
    address = str(subnets.node(node.index))
    _sign(layout, binaries, [{**request, "addresses": [address], "hosts": [node.name]}])
    write_kubeconfig(layout.component_kubeconfig(node.name), layout, node.name, subnets)


def write_kubeconfig(path: Path, layout: Layout, identity: str, subnets: Subnets) -> None:
    """A kubeconfig (YAML that is JSON) that stands alone: it names no other file."""
    cluster = {"server": subnets.server, "certificate-authority-data": _base64(layout.certificate("ca"))}
    user = {
        "client-certificate-data": _base64(layout.certificate(identity)),
        "client-key-data": _base64(layout.key(identity)),
    }
    name = "outrider-test-rig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": identity, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": identity}}],
        "current-context": name,
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=1))


def opener(layout: Layout) -> urllib.request.OpenerDirector:
    """Speaks to the API server with all rights, and through no proxy."""
    context = ssl.create_default_context(cafile=str(layout.certificate("ca")))
    context.load_cert_chain(layout.certificate(ADMIN), layout.key(ADMIN))
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def _client(name: str, common_name: str, *organization: str) -> dict[str, Any]:
    return {"name": name, "commonName": common_name, "organization": list(organization)}


def _sign(layout: Layout, binaries: Path, requests: Sequence[dict[str, Any]]) -> None:
    layout.certificates.mkdir(exist_ok=True)
    run([str(binaries / "certificates"), str(layout.certificates)], stdin=json.dumps(list(requests)))


def _base64(path: Path) -> str:
    return b64encode(path.read_bytes()).decode()
