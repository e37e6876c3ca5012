"""What others add to a list of Outrider's object."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from outrider_operator.cluster_model import ServiceIdentity
from outrider_operator.decide import drift
from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.workloads.children import network_policy, service

OURS = [{"name": f"OURS_{number}", "value": "1"} for number in range(40)]
THEIRS = [{"name": f"THEIRS_{number}", "value": "1"} for number in range(500)]


def test_foreign_list_entries_are_not_compared_with_each_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 variables, put before ours by hand, stay for ever: each look took a second."""
    compared = 0
    contains = drift.contains

    def counting(*pair: Any) -> bool:
        nonlocal compared
        compared += 1
        return contains(*pair)

    monkeypatch.setattr(drift, "contains", counting)
    assert counting({"env": [*THEIRS, *OURS]}, {"env": OURS})
    assert compared < len(THEIRS)


@pytest.mark.parametrize("changed", [[], [{"name": "OURS_0", "value": "2"}], [{"name": "OURS_0"}], ["OURS_0", None]])
def test_an_item_of_ours_that_is_gone_or_changed_is_seen(changed: list[Any]) -> None:
    assert not drift.contains({"env": [*THEIRS, *changed]}, {"env": OURS[:1]})


@pytest.mark.parametrize("rule", [0, 1])
def test_a_port_that_is_opened_by_hand_is_closed_again(rule: int) -> None:
    """The ports of a NetworkPolicy have no names that they could merge by: 9000 stayed open to all peers."""
    policy = stamp(network_policy(ServiceIdentity("chat", "ns", "uid"), ({"podSelector": {}},)))
    opened = copy.deepcopy(policy)
    assert not needs_apply(opened, policy)
    opened["spec"]["ingress"][rule]["ports"].append({"protocol": "TCP", "port": 9000})
    assert needs_apply(opened, policy)


def test_a_port_that_is_added_to_a_service_stays() -> None:
    """What others add to a list that merges is theirs."""
    desired = stamp(service(ServiceIdentity("chat", "ns", "uid")))
    extended = copy.deepcopy(desired)
    extended["spec"]["ports"].append({"name": "grpc", "port": 81, "protocol": "TCP"})
    assert not needs_apply(extended, desired)


@pytest.mark.parametrize(("sent", "stored"), [(1, "1"), ("1000m", "1"), ("0.5", "500m"), ("1024Ki", "1Mi")])
@pytest.mark.parametrize("field", ["divisor", "sizeLimit"])
def test_quantity_that_the_server_rewrites_is_the_same(field: str, sent: object, stored: str) -> None:
    """`resourceFieldRef.divisor: 1` was written again for ever, and an admission policy was blamed."""
    assert drift.contains({"env": [{field: stored}]}, {"env": [{field: sent}]})
    assert not drift.contains({"env": [{field: "3"}]}, {"env": [{field: sent}]})
