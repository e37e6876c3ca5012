"""Which addresses a cluster has: a pure function of its number, so that clusters stand side by side."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

MOST_CLUSTERS = 16
MOST_NODES = 32


@dataclass(frozen=True)
class Subnets:
    """The ranges of cluster `number` (0..15) on this machine."""

    number: int

    @property
    def link(self) -> IPv4Network:
        """Two addresses, of the machine and of the cluster."""
        return IPv4Network(f"10.98.{self.number}.0/30")

    @property
    def machine(self) -> IPv4Address:
        """The machine, as pods and nodes reach it."""
        return self.link[1]

    @property
    def gateway(self) -> IPv4Address:
        """The cluster's end of the link: the machine routes everything else through it."""
        return self.link[2]

    @property
    def nodes(self) -> IPv4Network:
        return IPv4Network(f"10.99.{self.number}.0/24")

    @property
    def pods(self) -> IPv4Network:
        return IPv4Network(f"10.{160 + self.number}.0.0/16")

    @property
    def services(self) -> IPv4Network:
        return IPv4Network(f"10.{192 + self.number}.0.0/16")

    @property
    def routed(self) -> tuple[IPv4Network, ...]:
        """What the machine reaches through the gateway."""
        return self.nodes, self.pods, self.services

    @property
    def kubernetes_service(self) -> IPv4Address:
        """Address at which pods find the API server: the first address of the service range."""
        return self.services[1]

    @property
    def server(self) -> str:
        return f"https://{self.node(0)}:6443"

    @property
    def interface(self) -> str:
        """The machine's end of the link; its existence reserves the number."""
        return f"outrider{self.number}"

    def node(self, index: int) -> IPv4Address:
        return self.nodes[1 + index]

    def pods_of(self, index: int) -> IPv4Network:
        """A node's pods: index 0..31, a /24 each."""
        return IPv4Network((int(self.pods.network_address) + 256 * index, 24))


def clashes(subnets: Subnets, taken: list[IPv4Network]) -> bool:
    """Whether a network that the machine already routes overlaps the cluster's."""
    return any(mine.overlaps(other) for mine in (subnets.link, *subnets.routed) for other in taken)
