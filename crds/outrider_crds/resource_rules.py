"""Rules for requests, limits and the accelerator's resource: what Kubernetes would refuse in a container."""

from __future__ import annotations

import re

from outrider_crds.names import RESOURCE_PATTERN
from outrider_crds.pod_template import Resources
from outrider_crds.quantity import amount
from outrider_crds.rule import Rule, cel_list, cel_pattern
from outrider_crds.spec import Accelerator

_PLAIN_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_LONGEST = 200  # Kubernetes puts "requests." before it
_COUNT = "^[0-9]{1,9}$"


def _is_extended(name: str) -> bool:
    return len(name) <= _LONGEST and re.fullmatch(RESOURCE_PATTERN, name) is not None and _is_not_native(name)


def _is_not_native(name: str) -> bool:
    return "kubernetes.io/" not in name and not name.startswith("requests.")


_NOT_NATIVE = "!{0}.contains('kubernetes.io/') && !{0}.startsWith('requests.')"


def _resource_names(resources: Resources) -> bool:
    names = {*resources.limits, *resources.requests}
    return all(name in _PLAIN_RESOURCES or _is_extended(name) for name in names)


def _whole_and_equal(resources: Resources) -> bool:
    limits, requests = resources.limits, resources.requests
    extended = {name for name in (*limits, *requests) if "/" in name}
    return all(
        re.fullmatch(_COUNT, str(limits.get(name, ""))) is not None
        and str(requests.get(name, limits.get(name))) == str(limits[name])
        for name in extended
    )


def _within_limits(resources: Resources) -> bool:
    limits = resources.limits
    return all(
        name not in limits or amount(value) <= amount(limits[name]) for name, value in resources.requests.items()
    )


def _all(field: str, condition: str) -> str:
    return f"(!has(self.{field}) || self.{field}.all(k, {condition}))"


_KNOWN_RESOURCE = (
    f"(k in {cel_list(_PLAIN_RESOURCES)} || (k.size() <= {_LONGEST} && k.matches({cel_pattern(RESOURCE_PATTERN)}) "
    f"&& {_NOT_NATIVE.format('k')}))"
)
_WHOLE_LIMIT = f"!k.contains('/') || string(self.limits[k]).matches({cel_pattern(_COUNT)})"
_EQUAL_LIMIT = (
    "!k.contains('/') || (has(self.limits) && k in self.limits && string(self.limits[k]) == string(self.requests[k]))"
)
_BELOW_LIMIT = (
    "!has(self.limits) || !(k in self.limits) "
    "|| quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0"
)

RESOURCE_RULES = (
    Rule(
        on=Resources,
        cel=f"{_all('limits', _KNOWN_RESOURCE)} && {_all('requests', _KNOWN_RESOURCE)}",
        holds=_resource_names,
        message=(
            f"resources may name {', '.join(_PLAIN_RESOURCES)} and extended resources such as example.com/nic: "
            "correct the name"
        ),
    ),
    Rule(
        on=Resources,
        cel=(f"{_all('limits', _WHOLE_LIMIT)} && {_all('requests', _EQUAL_LIMIT)}"),
        holds=_whole_and_equal,
        message="extended resources need a limit that is a whole number, and a request, if any, equal to it",
    ),
    Rule(
        on=Resources,
        field=".requests",
        cel=_all("requests", _BELOW_LIMIT),
        holds=_within_limits,
        message="requests must not exceed limits: lower the request or raise the limit",
    ),
    Rule(
        on=Accelerator,
        field=".resourceName",
        cel=_NOT_NATIVE.format("self.resourceName"),
        holds=lambda a: _is_not_native(a.resource_name),
        message="resourceName must be a device plugin's resource such as nvidia.com/gpu, not one of Kubernetes' own",
    ),
)
