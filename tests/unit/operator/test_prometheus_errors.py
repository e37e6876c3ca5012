"""What is said of a Prometheus that does not answer."""

from __future__ import annotations

from outrider_operator.cluster.cache import Key
from outrider_operator.service_metrics.prometheus import Connection, PrometheusFigures

from tests.ports import free_port


async def test_the_error_of_an_absent_prometheus_omits_the_query() -> None:
    """The sentence stands in conditions: the URL-encoded query filled them."""
    url = f"http://127.0.0.1:{free_port()}"
    figures = PrometheusFigures(Connection(url), 60.0)
    await figures.ask()
    said = figures.figures(Key("ns", "chat")).error
    assert said.startswith(f"Prometheus at {url} does not answer: ")
    assert "refused" in said
    assert "query" not in said
    assert "0x" not in said
