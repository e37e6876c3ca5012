"""The operator's environment: a bad value stops it with a sentence that names the variable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from outrider_crds.base import seconds
from outrider_operator.configuration import ConfigurationError, OperatorSettings, read_settings
from pydantic.alias_generators import to_snake

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_NAMESPACE", "outrider-system")
    monkeypatch.setenv("OUTRIDER_POD_NAME", "operator-0")


def test_the_namespace_alone_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings()
    assert settings.watch_namespaces == ()
    assert settings.resync_interval_s == 60.0
    monkeypatch.delenv("OUTRIDER_NAMESPACE")
    monkeypatch.setenv("NAMESPACE", "another")  # another program's variable
    with pytest.raises(ConfigurationError, match="OUTRIDER_NAMESPACE is not set"):
        read_settings()


def test_defaults_are_those_of_the_chart_and_of_the_page() -> None:
    """A figure that stands in three places is changed in all of them."""
    values = yaml.safe_load((REPOSITORY / "charts/outrider/values.yaml").read_text())
    page = (REPOSITORY / "docs/explanation/operator.md").read_text()
    settings = read_settings()
    for value, variable, default_s in (
        ("metricsWindow", "METRICS_WINDOW", settings.metrics_window_s),
        ("resyncInterval", "RESYNC_INTERVAL", settings.resync_interval_s),
        ("noCapacityAfter", "NO_CAPACITY_AFTER", settings.no_capacity_after_s),
    ):
        assert seconds(values[value]) == default_s
        assert f"| `OUTRIDER_{variable}` | `{values[value]}` |" in page


def test_settings_are_named_like_the_values_of_the_chart() -> None:
    """`noCapacityAfter` was `unschedulable_s` in the code."""
    values = yaml.safe_load((REPOSITORY / "charts/outrider/values.yaml").read_text())
    names = {to_snake("_".join(path)) for path in _paths(values)}
    chosen_by_templates = {
        "namespace", "pod_name", "lease_name", "watch_nodes", "admin_port_peers", "prometheus_ca_file",
        "prometheus_token_file", "health_port", "metrics_port",
    }  # fmt: skip
    assert {name.removesuffix("_s") for name in OperatorSettings.model_fields} - names == chosen_by_templates


def _paths(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *path) for path in _paths(value))


def test_every_variable_is_on_the_page() -> None:
    page = (REPOSITORY / "docs/explanation/operator.md").read_text()
    variables = {str(field.validation_alias) for field in OperatorSettings.model_fields.values()}
    assert variables == set(re.findall(r"`(OUTRIDER_\w+)`", page.partition("| variable")[2]))


def test_values_are_read_in_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WATCH_NAMESPACES": "b, a,,a",
        "WATCH_NODES": "false",
        "RESYNC_INTERVAL": "1m30s",
        "ALLOWED_HOST_PATHS": "/models, /srv/models",
        "PROMETHEUS_URL": "http://prometheus:9090/",
        "ADMIN_PORT_PEERS": '[{"podSelector": {}}]',
        "LOG_LEVEL": "",
    }.items():
        monkeypatch.setenv(f"OUTRIDER_{name}", value)
    settings = read_settings()
    assert settings.watch_namespaces == ("a", "b")
    assert not settings.watch_nodes
    assert settings.resync_interval_s == 90.0
    assert settings.allowed_host_paths == ("/models", "/srv/models")
    assert settings.prometheus_url == "http://prometheus:9090"
    assert settings.admin_port_peers == ({"podSelector": {}},)
    assert settings.log_level == "info"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("WATCH_NODES", "perhaps", "valid boolean"),
        ("RUNTIME_UPGRADE_PERCENT", "101", "less than or equal to 100"),
        ("ALLOWED_HOST_PATHS", "models", "must be an absolute path"),
        ("ALLOWED_HOST_PATHS", "/models/../etc", "must be an absolute path"),
        ("ADMIN_PORT_PEERS", "monitoring", "must be a JSON list of objects"),
        ("ADMIN_PORT_PEERS", '["monitoring"]', "valid dictionary"),
        ("RESYNC_INTERVAL", "often", "is not a duration"),
        ("RESYNC_INTERVAL", "0s", "greater than 0"),
        ("PROMETHEUS_URL", "prometheus:9090", "match pattern"),
        ("PROMETHEUS_CA_FILE", "/nowhere/ca.crt", "no such file"),
        ("HEALTH_PORT", "70000", "less than or equal to 65535"),
        ("HEALTH_PORT", "http", "valid integer"),
        ("LOG_LEVEL", "chatty", "'debug', 'info'"),
        ("RUNTIME_IMAGE_PULL_POLICY", "Sometimes", "'Always'"),
    ],
)
def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str) -> None:
    monkeypatch.setenv(f"OUTRIDER_{name}", value)
    with pytest.raises(ConfigurationError, match=re.escape(f"OUTRIDER_{name}=") + f".*{sentence}"):
        read_settings()
