"""What the test rig decides before it touches the machine."""

from __future__ import annotations

import sys
from ipaddress import IPv4Network
from itertools import combinations
from pathlib import Path

import pytest

from setup import binaries
from setup.steps import REPOSITORY
from tests.cluster import sandbox
from tests.cluster.errors import ClusterError
from tests.cluster.images import machine_folders
from tests.cluster.spec import ClusterSpec
from tests.cluster.subnets import MOST_CLUSTERS, MOST_NODES, Subnets, clashes


def test_clusters_and_their_ranges_never_overlap() -> None:
    """Two clusters side by side would otherwise swallow each other's traffic."""
    ranges = [network for number in range(MOST_CLUSTERS) for network in (Subnets(number).link, *Subnets(number).routed)]
    assert [pair for pair in combinations(ranges, 2) if pair[0].overlaps(pair[1])] == []


def test_each_nodes_addresses_lie_within_its_clusters_range() -> None:
    """A pod's address says its node, and the machine routes it."""
    subnets = Subnets(3)
    nodes = [subnets.node(index) for index in range(MOST_NODES)]
    pods = [subnets.pods_of(index) for index in range(MOST_NODES)]
    assert len({*nodes}) == len({*pods}) == MOST_NODES
    assert all(node in subnets.nodes for node in nodes)
    assert all(share.subnet_of(subnets.pods) for share in pods)


def test_cluster_number_whose_range_is_in_use_is_skipped() -> None:
    """A VPN or a container network of the user's must stay reachable."""
    assert clashes(Subnets(2), [IPv4Network("10.162.7.0/24")])
    assert clashes(Subnets(2), [IPv4Network("10.0.0.0/8")])
    assert not clashes(Subnets(2), [IPv4Network("192.0.2.0/24"), IPv4Network("10.163.0.0/16")])


@pytest.mark.parametrize("hidden", ["/run/user/0/state", "/var/lib/jenkins/state", "/srv/state"])
def test_a_state_folder_that_the_cluster_would_hide_is_refused(hidden: str) -> None:
    """Its socket and logs could not be seen from the machine."""
    with pytest.raises(ClusterError, match="choose another"):
        sandbox.refuse_hidden(Path(hidden))


@pytest.mark.parametrize(("nodes", "products"), [(0, ()), (MOST_NODES, ("NVIDIA-L4",))])
def test_a_cluster_without_nodes_or_with_too_many_is_refused(nodes: int, products: tuple[str, ...]) -> None:
    """The node's index is a part of its address."""
    with pytest.raises(ClusterError, match="nodes"):
        ClusterSpec(nodes, products)


def test_pods_see_checkout_and_environment_not_the_whole_machine() -> None:
    """What is mounted into every container, each folder once."""
    folders = machine_folders()
    for needed in (REPOSITORY, Path(sys.prefix), Path(sys.executable).resolve()):
        assert any(needed.is_relative_to(folder) for folder in folders), needed
    assert not {Path("/"), Path("/root"), Path("/etc"), Path.home()} & set(folders)
    assert [pair for pair in combinations(folders, 2) if pair[1].is_relative_to(pair[0])] == []


def test_changed_source_of_the_cluster_binary_means_a_new_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is keyed by content: a stale binary would test another Kubernetes than the code says."""
    for name in ("go.mod", "go.sum", "main.go"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(binaries, "MODULE", tmp_path)
    first = binaries.kubernetes_folder()
    (tmp_path / "main.go").write_text("changed")
    assert binaries.kubernetes_folder() != first
