"""A gateway on the cluster: Envoy, which asks the extension's own endpoint picker for each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.operator.manifests import IMAGE

GATEWAY_PORT, PICKER_PORT = 8080, 9002
STEERING_HEADER = "test-epp-endpoint-selection"
"""The picker chooses among these addresses."""
_TYPES = "type.googleapis.com/envoy.extensions"


def run_picker(cluster: Kubectl, program: Path, service: str, namespace: str, role: str) -> None:
    """The picker of the service's pool, as `docs/how-to/route-by-load.md` says: its account has `role` alone."""
    name = f"{service}-epp"
    options = ["--pool-name", service, "--pool-namespace", namespace, "--grpc-port", str(PICKER_PORT)]
    command = [f"/program/{program.name}", *options, "--secure-serving=false"]
    ports = [{"port": PICKER_PORT, "targetPort": PICKER_PORT, "protocol": "TCP"}]
    cluster.kubectl("create", "serviceaccount", name, "-n", namespace)
    account = f"--serviceaccount={namespace}:{name}"
    cluster.kubectl("create", "rolebinding", name, "-n", namespace, account, f"--clusterrole={role}")
    metadata = {"name": name, "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
         "spec": {"selector": {"app": name}, "ports": ports}},
        _pod(name, namespace, command, _folder(program), serviceAccountName=name),
    )  # fmt: skip


def run_envoy(cluster: Kubectl, program: Path, name: str, namespace: str, picker_address: str) -> None:
    """An Envoy that asks the picker at that address and sends each request where the picker says."""
    config = json.dumps(_envoy_config(picker_address))
    metadata = {"name": name, "namespace": namespace}
    cluster.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"envoy.json": config}},
        _pod(
            name, namespace, [f"/program/{program.name}", "-c", "/config/envoy.json", "--concurrency", "1"],
            {**_folder(program), "config": {"configMap": {"name": name}}},
        ),
    )  # fmt: skip


def _folder(program: Path) -> dict[str, Any]:
    return {"program": {"hostPath": {"path": str(program.parent)}}}


def _pod(name: str, namespace: str, command: list[str], volumes: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A pod of a program of this machine; each volume is mounted under its name."""
    mounts = [{"name": volume, "mountPath": f"/{volume}", "readOnly": True} for volume in volumes]
    container = {"name": "main", "image": IMAGE, "command": command, "volumeMounts": mounts}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {
            "containers": [container],
            "volumes": [{"name": volume, **source} for volume, source in volumes.items()],
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


def _envoy_config(picker_address: str) -> dict[str, Any]:
    """Bodies are sent and come back in pieces, as llm-d's picker needs it."""
    streamed = "FULL_DUPLEX_STREAMED"
    modes = {
        "request_header_mode": "SEND", "request_body_mode": streamed, "request_trailer_mode": "SEND",
        "response_header_mode": "SKIP", "response_body_mode": "NONE", "response_trailer_mode": "SKIP",
    }  # fmt: skip
    picking = {
        "@type": f"{_TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "processing_mode": modes,
        "message_timeout": "10s",
    }
    routing = {"@type": f"{_TYPES}.filters.http.router.v3.Router"}
    routes = [{"match": {"prefix": "/v1"}, "route": {"cluster": "pool"}}]
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {"name": "picking", "typed_config": picking},
            {"name": "routing", "typed_config": routing},
        ],
    }
    listener = {
        "name": "http",
        "address": _address("0.0.0.0", GATEWAY_PORT),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [_picker_cluster(picker_address), _POOL]}}


_POOL = {
    "name": "pool",
    "type": "ORIGINAL_DST",
    "lb_policy": "CLUSTER_PROVIDED",
    "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
}
"""Each request goes to the address in the header that the picker sets."""


def _picker_cluster(address: str) -> dict[str, Any]:
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    endpoint = {"endpoint": {"address": _address(address, PICKER_PORT)}}
    grpc = {"@type": f"type.googleapis.com/{options}", "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": "picker",
        "type": "STATIC",
        "typed_extension_protocol_options": {options: grpc},
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _address(address: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": address, "port_value": port}}
