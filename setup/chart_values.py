"""Values of the chart as models: values.schema.json, and the defaults that templates fall back on.

`python -m setup.reference` writes both; values.yaml holds the defaults and says what each value is for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import yaml
from outrider_crds.base import DURATION_PATTERN, Model, Percent
from outrider_operator.configuration import LogFormat, LogLevel, PullPolicy
from pydantic import Field

from setup.steps import REPOSITORY

CHART = REPOSITORY / "charts" / "outrider"
SCHEMA_FILE = CHART / "values.schema.json"
DEFAULTS_FILE = CHART / "templates" / "_defaults.tpl"
_DROPPED = ("$ref", "title", "description", "required")  # a value that is absent has its default

Object = dict[str, Any]
Texts = dict[str, str]
Filled = Annotated[str, Field(min_length=1)]
NamespaceName = Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Namespaces = Annotated[list[NamespaceName], Field(json_schema_extra={"uniqueItems": True})]
Duration = Annotated[str, Field(pattern=DURATION_PATTERN)]
_ZERO = {"not": {"pattern": r"^(0+(\.0+)?(us|ms|s|m|h))+$"}}
Interval = Annotated[Duration, Field(json_schema_extra=_ZERO)]
PrometheusDuration = Annotated[str, Field(pattern="^[0-9]+(ms|s|m)$", json_schema_extra=_ZERO)]
PortNumber = Annotated[int, Field(ge=1, le=65535)]


class OperatorImage(Model):
    repository: Filled
    tag: str
    digest: Annotated[str, Field(pattern="^(sha256:[0-9a-f]{64})?$")]
    pull_policy: PullPolicy


class EnvironmentVariable(Model, extra="allow"):
    # The chart's own variables would stand in the container twice.
    name: Annotated[str, Field(json_schema_extra={"not": {"pattern": "^(OUTRIDER_.*|HOME)$"}})]


class OperatorPod(Model):
    image: OperatorImage
    image_pull_secrets: list[Object]
    resources: Object
    replicas: Annotated[int, Field(ge=1, le=5)]
    topology_spread_constraints: list[Object]
    node_selector: Texts
    tolerations: list[Object]
    affinity: Object
    priority_class_name: str
    pod_labels: Texts
    pod_annotations: Texts
    env: list[EnvironmentVariable]


class ServiceAccountValues(Model):
    create: bool
    name: str
    annotations: Texts


class ByHardware(Model):
    gpu: str
    cpu: str


class RuntimeValues(Model):
    image: ByHardware
    engine_version: ByHardware
    image_pull_policy: PullPolicy
    upgrade_percent: Percent


class RbacValues(Model):
    cluster_scoped: bool
    user_roles: bool


class CrdValues(Model):
    install: bool


class PrometheusCa(Model):
    config_map: str
    key: Filled


class PrometheusToken(Model):
    secret: str
    key: Filled


class PrometheusValues(Model):
    url: Annotated[str, Field(pattern="^(https?://.+)?$")]
    timeout: PrometheusDuration
    ca: PrometheusCa
    token: PrometheusToken


class PriorityClassValues(Model):
    create: bool
    name: str
    value: Annotated[int, Field(ge=-10, le=0)]


class ProfilingValues(Model):
    shared_from: Namespaces
    priority_class: PriorityClassValues


class LogValues(Model):
    level: LogLevel
    format: LogFormat


class OperatorPolicy(Model):
    enabled: bool
    api_server_ports: list[PortNumber]
    extra_egress: list[Object]


class PolicyPeer(Model):
    namespace_selector: Object
    pod_selector: Object
    ip_block: Object


class ServingPolicy(Model):
    enabled: bool
    monitoring: list[Annotated[PolicyPeer, Field(json_schema_extra={"minProperties": 1})]]


class PodMonitorValues(Model):
    enabled: bool
    labels: Texts
    interval: PrometheusDuration


class PrometheusRuleValues(Model):
    enabled: bool
    labels: Texts
    runbook_url: Annotated[str, Field(pattern="^(https?://[^#]+)?$")]
    slo_attainment_percent: Annotated[float, Field(ge=0, le=100)]


class DashboardValues(Model):
    enabled: bool
    labels: Texts
    annotations: Texts


class ChartValues(Model):
    enabled: bool
    operator: OperatorPod
    service_account: ServiceAccountValues
    runtime: RuntimeValues
    watch_namespaces: Namespaces
    rbac: RbacValues
    crd: CrdValues
    allowed_host_paths: list[Annotated[str, Field(pattern="^/[^,]*$")]]
    platform_assigns_user: bool | None
    prometheus: PrometheusValues
    profiling: ProfilingValues
    resync_interval: Interval
    metrics_window: Interval
    no_capacity_after: Duration
    log: LogValues
    network_policy: OperatorPolicy
    serving_network_policy: ServingPolicy
    pod_monitor: PodMonitorValues
    prometheus_rule: PrometheusRuleValues
    grafana_dashboards: DashboardValues
    fullname_override: Annotated[str, Field(pattern="^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")]


def schema_text() -> str:
    """values.schema.json."""
    document = ChartValues.model_json_schema()
    schema = _plain(document, document.pop("$defs"))
    schema["properties"]["global"] = {"type": "object"}  # helm adds it to a chart inside another one
    about = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the Outrider chart"}
    return json.dumps({**about, **schema}, indent=1) + "\n"


def _plain(node: Any, definitions: Object) -> Any:
    """`node` with definitions in place of references, since draft 7 ignores other keys next to one."""
    if isinstance(node, list):
        return [_plain(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        node = {**definitions[node["$ref"].rpartition("/")[2]], **node}
    kept = {key: value for key, value in node.items() if key not in _DROPPED}
    if "properties" in kept:
        kept["properties"] = {name: _plain(value, definitions) for name, value in kept["properties"].items()}
    return {key: value if key == "properties" else _plain(value, definitions) for key, value in kept.items()}


def defaults_text() -> str:
    """templates/_defaults.tpl: the path of each value that has no parts, and its default."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = [f"{path}: {json.dumps(value)}" for path, value in _leaves(ChartValues, values)]
    return (
        "{{/* Generated by `python -m setup.reference` from values.yaml: defaults of values that a release lacks,\n"
        "     as after `helm upgrade --reuse-values` from an older chart. */}}\n"
        '{{- define "outrider.defaults" -}}\n' + "\n".join(lines) + "\n{{- end }}\n"
    )


def _leaves(model: type[Model], values: Object, above: str = "") -> Iterator[tuple[str, Any]]:
    for field in model.model_fields.values():
        name, part = str(field.alias), field.annotation
        if isinstance(part, type) and issubclass(part, Model):
            yield from _leaves(part, values[name], f"{above}{name}.")
        else:
            yield f"{above}{name}", values[name]
