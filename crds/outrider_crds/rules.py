"""Rules that span fields: one table of CEL, evaluated by the API server, and here for `serve -f` and the operator.

A rule belongs to a model and holds wherever that model stands in the resource.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

from outrider_crds.base import Model
from outrider_crds.engine_rules import ENGINE_RULES
from outrider_crds.existing_pods_rules import WORKLOAD_RULES
from outrider_crds.hardware_rules import HARDWARE_RULES
from outrider_crds.model_rules import MODEL_RULES
from outrider_crds.pod_rules import POD_RULES
from outrider_crds.pool_rules import POOL_RULES
from outrider_crds.rollout_settings import Rollout, RolloutCanary
from outrider_crds.rule import Rule, positive, rules_on
from outrider_crds.service import SpeculativeService
from outrider_crds.spec import Profiling, SLOClassSpec, SpeculativeServiceSpec

SERVICE_NAME_PATTERN = "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
_CACHED_VERDICTS = 4096  # a service has some 20 models, most of them equal to another service's
_CACHED_BYTES = 8192  # of a document: larger ones are judged again each time, so that the cache stays under 32 MiB

_NAME_RULES = rules_on(
    SpeculativeService,
    (
        ".metadata.name",
        f"self.metadata.name.matches('{SERVICE_NAME_PATTERN}')",
        "metadata.name must be at most 40 lower-case letters, digits and '-', begin with a letter and not end "
        "with '-' (it names the Service and the pods): choose another name",
    ),
)

_LATENCY_RULES = (
    positive(SLOClassSpec, "tpot"),
    positive(SLOClassSpec, "ttft"),
    *rules_on(
        SpeculativeServiceSpec,
        (
            ".defaultSLOClass",
            "!has(self.defaultSLOClass) "
            "|| (has(self.sloClasses) && self.sloClasses.exists(c, c.name == self.defaultSLOClass))",
            "defaultSLOClass must be the name of one of spec.sloClasses: add the class or correct the name",
        ),
    ),
)

# A rule for every duration: the API server's own type check lets a list through where a format is given.
_PROCESS_RULES = (
    positive(Profiling, "maxAge"),
    positive(Profiling, "timeBudget"),
    *rules_on(
        Profiling,
        (
            ".timeBudget",
            "duration(self.timeBudget) <= duration(self.timeout)",
            "timeBudget must not exceed timeout, which also covers loading the model: raise timeout",
        ),
    ),
    *rules_on(
        Rollout,
        (
            ".maxUnavailable",
            "self.maxSurge > 0 || self.maxUnavailable > 0",
            "maxSurge and maxUnavailable must not both be 0: set maxUnavailable to 1 where no GPU is free",
        ),
        (
            ".progressDeadline",
            "duration(self.progressDeadline) >= duration('10s')",
            "progressDeadline must be at least 10s, the time a pod has to get ready: write a longer one",
        ),
        (
            ".drainTimeout",
            "duration(self.drainTimeout) <= duration('24h')",
            "drainTimeout must be at most 24h, for the old pod holds its hardware so long: write a shorter one",
        ),
    ),
    *rules_on(
        RolloutCanary,
        (
            ".timeout",
            "duration(self.timeout) >= duration('1m') && duration(self.timeout) <= duration('168h')",
            "timeout of the canary must be between 1m and 168h",
        ),
    ),
)

RULES: tuple[Rule, ...] = (
    *_NAME_RULES, *MODEL_RULES, *POOL_RULES, *HARDWARE_RULES, *_LATENCY_RULES, *_PROCESS_RULES, *ENGINE_RULES,
    *POD_RULES, *WORKLOAD_RULES,
)  # fmt: skip


@cache
def rules_of(model: type[Model]) -> tuple[Rule, ...]:
    """The rules that belong to `model`."""
    return tuple(rule for rule in RULES if rule.on is model)


def violations(model: Model, path: str = "") -> Iterator[str]:
    """A sentence for each rule that `model`, or a part of it, breaks: "spec.rollout.maxSurge: ..."."""
    for rule in _broken_rules(model):
        yield f"{(path + rule.field).lstrip('.') or 'manifest'}: {rule.message}"
    for name, field in type(model).model_fields.items():
        yield from _violations_below(getattr(model, name), f"{path}.{field.alias or name}")


def _violations_below(value: object, path: str) -> Iterator[str]:
    if isinstance(value, Model):
        yield from violations(value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _violations_below(item, f"{path}[{index}]")


def _broken_rules(model: Model) -> tuple[Rule, ...]:
    if not rules_of(type(model)):
        return ()
    document = model.model_dump_json(by_alias=True, exclude_none=True)
    judge = _find_broken_rules if len(document) <= _CACHED_BYTES else _find_broken_rules.__wrapped__
    return judge(type(model), document)


@lru_cache(_CACHED_VERDICTS)  # the engine's patterns take milliseconds
def _find_broken_rules(model: type[Model], document: str) -> tuple[Rule, ...]:
    """The rules that the JSON `document` of a `model` breaks."""
    import cel  # here: it imports its command line, 0.6 s that a pod's start and the plugin need not wait

    content = json.loads(document)
    context = cel.Context({"self": content, "oldSelf": content}, {"split": str.split})  # here nothing changes
    return tuple(rule for rule in rules_of(model) if not _program(rule.cel)(context))


def compile_rules() -> None:
    """Compile all rules now. It takes a second, which the first evaluation would take otherwise."""
    for rule in RULES:
        _program(rule.cel)


@cache
def _program(expression: str) -> Callable[[Any], Any]:
    import cel

    execute: Callable[[Any], Any] = cel.compile(expression).execute
    return execute
