"""What the host's work costs in replays and on the virtual clock: `bench.host_step`'s figures."""

from __future__ import annotations

import pytest

from bench.host_costs import LOOP, PLAIN, HostCosts, added_us, host_costs


def test_host_costs_are_straight_between_the_measured_batches():
    costs = HostCosts((1, 64, 256), (1.0, 4.0, 10.0), (0.0, 1.0, 1.0))
    assert costs.schedule(64) == 4.0
    assert costs.schedule(160) == pytest.approx(7.0)
    assert costs.schedule(500) == 10.0
    assert costs.update(0) == 0.0


@pytest.mark.parametrize("drafters", [("eagle", "lookup"), ("draft", "lookup"), ("lookup",)])
def test_added_host_time_is_the_loops_less_plain_decodings(drafters):
    """The replay charges the difference, the judge both."""
    loop, plain = host_costs(drafters, LOOP), host_costs(drafters, PLAIN)
    for requests, microseconds in added_us(drafters):
        both = loop.schedule(requests) + loop.update(requests) - plain.schedule(requests) - plain.update(requests)
        assert both * 1e6 == pytest.approx(microseconds, rel=0.1)


def test_host_costs_depend_on_the_drafters_of_the_pool():
    assert added_us(("draft", "lookup")) != added_us(("eagle", "lookup"))
