"""The command lines of etcd, the API server and its companions: pure functions of the layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.cluster import certificates
from tests.cluster.layout import VOLATILE, Layout
from tests.cluster.subnets import Subnets

ETCD = "etcd"
API_SERVER = "kube-apiserver"
_ETCD_ADDRESS = "http://127.0.0.1:2379"  # of the namespace's own loopback


def etcd(binaries: Path) -> list[str]:
    """etcd on tmpfs and without fsync: the data lives as long as the cluster."""
    return [
        str(binaries / "etcd"),
        f"--data-dir={VOLATILE / 'etcd'}",
        f"--listen-client-urls={_ETCD_ADDRESS}",
        f"--advertise-client-urls={_ETCD_ADDRESS}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(binaries: Path, layout: Layout, subnets: Subnets) -> list[str]:
    """The API server with RBAC, node authorisation and an audit log of writes, as in production."""
    own, proxy = certificates.API_SERVER, certificates.FRONT_PROXY
    authority = layout.certificate("ca")
    return [
        str(binaries / "kube-apiserver"),
        f"--etcd-servers={_ETCD_ADDRESS}",
        f"--bind-address={subnets.node(0)}",
        f"--advertise-address={subnets.node(0)}",
        f"--service-cluster-ip-range={subnets.services}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction,Priority",
        f"--client-ca-file={authority}",
        f"--tls-cert-file={layout.certificate(own)}",
        f"--tls-private-key-file={layout.key(own)}",
        f"--kubelet-certificate-authority={authority}",
        f"--kubelet-client-certificate={layout.certificate(own)}",
        f"--kubelet-client-key={layout.key(own)}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={layout.key(certificates.SERVICE_ACCOUNTS)}",
        f"--service-account-signing-key-file={layout.key(certificates.SERVICE_ACCOUNTS)}",
        f"--requestheader-client-ca-file={authority}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={layout.certificate(proxy)}",
        f"--proxy-client-key-file={layout.key(proxy)}",
        f"--audit-policy-file={audit_policy(layout)}",
        f"--audit-log-path={layout.audit}",
    ]


def audit_policy(layout: Layout) -> Path:
    """Log of writes and their users, without bodies: tests count writes with it."""
    return layout.state / "audit-policy.json"


def write_audit_policy(layout: Layout) -> None:
    """One line for each write, after it was answered."""
    writes = {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]}
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [writes, {"level": "None"}],
    }
    audit_policy(layout).write_text(json.dumps(policy))


def api_server_companions(binaries: Path, layout: Layout, subnets: Subnets) -> dict[str, list[str]]:
    """What can start only when the API server is ready: without its RBAC roles they exit."""
    manager = [
        str(binaries / "kube-controller-manager"),
        f"--kubeconfig={layout.component_kubeconfig(certificates.CONTROLLER_MANAGER)}",
        f"--service-account-private-key-file={layout.key(certificates.SERVICE_ACCOUNTS)}",
        f"--root-ca-file={layout.certificate('ca')}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--node-monitor-period=1s",
        "--horizontal-pod-autoscaler-sync-period=2s",
    ]
    scheduler = [
        str(binaries / "kube-scheduler"),
        f"--kubeconfig={layout.component_kubeconfig(certificates.SCHEDULER)}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    ]
    proxy = [
        str(binaries / "kube-proxy"),
        f"--kubeconfig={layout.component_kubeconfig(certificates.PROXY)}",
        "--proxy-mode=nftables",
        f"--cluster-cidr={subnets.pods}",
        "--hostname-override=node-1",
        f"--healthz-bind-address={subnets.node(0)}:10256",
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    ]
    enforcer = [sys.executable, "-m", "tests.cluster.enforcer", str(layout.state), subnets.server]
    return {
        "kube-controller-manager": manager,
        "kube-scheduler": scheduler,
        "kube-proxy": proxy,
        "network-policies": enforcer,
    }
