"""The link between the machine and a cluster's network namespace: the only thing outside that namespace.

It dies with the namespace, and the routes die with it.
"""

from __future__ import annotations

import json
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.subnets import MOST_CLUSTERS, Subnets, clashes

UPLINK = "uplink"
_BRIDGE = "nodes"


def ip(*arguments: str) -> str:
    """Run `ip`; ClusterError with its own words when it refuses."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


def link_to(pid: int) -> Subnets:
    """Link the network namespace of `pid` to this machine on the first number that is free."""
    for number in range(MOST_CLUSTERS):
        subnets = Subnets(number)
        if clashes(subnets, _routed()):
            continue
        try:
            # One call makes both ends, so no end is ever left outside a namespace that died.
            ip("link", "add", subnets.interface, "type", "veth", "peer", "name", UPLINK, "netns", str(pid))
        except ClusterError:
            if not Path("/sys/class/net", subnets.interface).exists():
                raise
            continue  # another cluster was faster
        _route(subnets)
        return subnets
    raise ClusterError(
        f"All {MOST_CLUSTERS} address ranges for clusters are taken (10.98-10.99, 10.160-10.207): "
        "stop a cluster, or look at `ip route` for what else uses them."
    )


def unlink(subnets: Subnets) -> None:
    """Remove the machine's end at once: the kernel would do it a moment after the namespace is gone."""
    subprocess.run(["ip", "link", "del", subnets.interface], capture_output=True, check=False)


def _route(subnets: Subnets) -> None:
    ip("address", "add", f"{subnets.machine}/{subnets.link.prefixlen}", "dev", subnets.interface)
    ip("link", "set", subnets.interface, "up")
    for network in subnets.routed:
        ip("route", "add", str(network), "via", str(subnets.gateway), "dev", subnets.interface)


def _routed() -> list[IPv4Network]:
    routes = json.loads(ip("-json", "-4", "route", "show", "table", "main") or "[]")
    return [IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]


def build_inside(subnets: Subnets) -> None:
    """Devices in the cluster's namespace: loopback, the link, and a bridge that holds the nodes' addresses."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{subnets.gateway}/{subnets.link.prefixlen}", "dev", UPLINK)
    ip("link", "set", UPLINK, "up")
    ip("link", "add", _BRIDGE, "type", "bridge")
    ip("link", "set", _BRIDGE, "up")
    add_node_address(subnets, 0)


def add_node_address(subnets: Subnets, index: int) -> None:
    """Give the node of that index its address; the API server refuses loopback ones."""
    ip("address", "replace", f"{subnets.node(index)}/{subnets.nodes.prefixlen}", "dev", _BRIDGE)
