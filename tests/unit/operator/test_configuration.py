"""The operator's environment: a bad value stops it with a sentence that names the variable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from outrider_crds.base import seconds
from outrider_operator.cluster_model import OperatorSettings
from outrider_operator.configuration import ConfigurationError, read_configuration

REPOSITORY = Path(__file__).parents[3]

MINIMAL = {"OUTRIDER_NAMESPACE": "outrider-system", "OUTRIDER_POD_NAME": "operator-0"}


def test_the_namespace_alone_is_required() -> None:
    configuration = read_configuration(MINIMAL)
    assert configuration.watch_namespaces == ()
    assert configuration.resync_interval_s == 60.0
    with pytest.raises(ConfigurationError, match="OUTRIDER_NAMESPACE is not set"):
        read_configuration({})


def test_defaults_are_those_of_the_chart_and_of_the_page() -> None:
    """A figure that stands in four places is changed in all of them."""
    values = yaml.safe_load((REPOSITORY / "charts/outrider/values.yaml").read_text())
    page = (REPOSITORY / "docs/explanation/operator.md").read_text()
    configuration = read_configuration(MINIMAL)
    for value, variable, default_s in (
        ("metricsWindow", "METRICS_WINDOW", configuration.metrics_window_s),
        ("resyncInterval", "RESYNC_INTERVAL", configuration.resync_interval_s),
    ):
        assert seconds(values[value]) == default_s
        assert f"| `OUTRIDER_{variable}` | `{values[value]}` |" in page
    assert OperatorSettings(runtime_image="", runtime_cpu_image="").window_s == configuration.metrics_window_s


def test_values_are_read_in_their_units() -> None:
    configuration = read_configuration(
        {
            **MINIMAL,
            "OUTRIDER_WATCH_NAMESPACES": "b, a,,a",
            "OUTRIDER_RESYNC_INTERVAL": "1m30s",
            "OUTRIDER_ALLOWED_HOST_PATHS": "/models, /srv/models",
            "OUTRIDER_PROMETHEUS_URL": "http://prometheus:9090/",
        }
    )
    assert configuration.watch_namespaces == ("a", "b")
    assert configuration.resync_interval_s == 90.0
    assert configuration.allowed_host_paths == ("/models", "/srv/models")
    assert configuration.prometheus_url == "http://prometheus:9090"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("WATCH_NODES", "yes", "must be true or false"),
        ("RUNTIME_UPGRADE_PERCENT", "101", "0 to 100"),
        ("ALLOWED_HOST_PATHS", "models", "must be an absolute path"),
        ("ALLOWED_HOST_PATHS", "/models/../etc", "must be an absolute path"),
        ("ADMIN_PORT_PEERS", "monitoring", "must be a JSON list of objects"),
        ("ADMIN_PORT_PEERS", '["monitoring"]', "must be a JSON list of objects"),
        ("RESYNC_INTERVAL", "often", "is not a duration"),
        ("PROMETHEUS_URL", "prometheus:9090", "must start with http"),
        ("PROMETHEUS_CA_FILE", "/nowhere/ca.crt", "no such file"),
        ("HEALTH_PORT", "70000", "between 1 and 65535"),
        ("HEALTH_PORT", "http", "invalid literal"),
        ("LOG_LEVEL", "chatty", "must be one of debug, info"),
        ("RUNTIME_IMAGE_PULL_POLICY", "Sometimes", "must be one of Always"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"OUTRIDER_{name}='{value}'") + f".*{sentence}"):
        read_configuration({**MINIMAL, f"OUTRIDER_{name}": value})
