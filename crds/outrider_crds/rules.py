"""Rules that span fields: one table, held by the API server as CEL and by `serve -f` as a predicate of the model.

A rule belongs to a model and holds wherever that model stands in the resource. The two forms of a rule must agree:
the corpus in tests/corpus goes through both, and so do random manifests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from outrider_crds.base import Model, seconds
from outrider_crds.engine_rules import ENGINE_RULES, EXECUTOR, cel_sets_none, sets_none
from outrider_crds.pod_rules import POD_RULES
from outrider_crds.pod_template import HostPathVolume
from outrider_crds.resource_rules import RESOURCE_RULES
from outrider_crds.rule import Rule
from outrider_crds.scheduling_rules import SCHEDULING_RULES
from outrider_crds.service import SpeculativeService
from outrider_crds.spec import (
    CPU_PRODUCT,
    Accelerator,
    AdapterFolder,
    AdapterSource,
    AdapterVolume,
    Backend,
    CABundle,
    DrafterSpec,
    DraftMethod,
    HostPathSource,
    ModelCache,
    ModelRef,
    ModelSource,
    OciSource,
    Profiling,
    ProfilingMode,
    PromptLookup,
    PvcSource,
    Rollout,
    RolloutCanary,
    RolloutStrategy,
    SLOClassSpec,
    SpeculationMode,
    SpeculativeServiceSpec,
)

_SPLIT_KV = "--decode-context-parallel-size"
SERVICE_NAME_PATTERN = "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
_BLOCKS = {
    DraftMethod.PROMPT_LOOKUP: ("promptLookup", "prompt_lookup"),
    DraftMethod.DRAFT_MODEL: ("draftModel", "draft_model"),
    DraftMethod.EAGLE: ("eagle", "eagle"),
    DraftMethod.SPARSE_SELF: ("sparseSelf", "sparse_self"),
    DraftMethod.MEDUSA: ("medusa", "medusa"),
    DraftMethod.BLOCK: ("block", "block"),
    DraftMethod.MTP: ("mtp", "mtp"),
}


def _method_rules(method: DraftMethod, block: str, attribute: str) -> tuple[Rule, Rule]:
    """A method needs its block, and a block its method."""
    return (
        Rule(
            on=DrafterSpec,
            field=".method",
            cel=f"self.method != '{method}' || has(self.{block})",
            holds=lambda d: d.method != method or getattr(d, attribute) is not None,
            message=f"method {method} needs the block {block}: add it (it may be empty where nothing is required)",
        ),
        Rule(
            on=DrafterSpec,
            field=f".{block}",
            cel=f"self.method == '{method}' || !has(self.{block})",
            holds=lambda d: d.method == method or getattr(d, attribute) is None,
            message=f"the block {block} belongs to method {method}: remove it or change the method",
        ),
    )


def _served_by(method: DraftMethod, backend: Backend, why: str) -> Rule:
    """A method that one engine alone has."""
    return Rule(
        on=SpeculativeServiceSpec,
        field=".draftPool",
        cel=(
            f"self.engine.backend == '{backend}' || !has(self.draftPool) "
            f"|| !self.draftPool.exists(d, d.method == '{method}')"
        ),
        holds=lambda s: s.engine.backend is backend or all(d.method is not method for d in s.draft_pool),
        message=f"method {method} needs engine.backend {backend} ({why}): set it, or remove the drafter",
    )


def _positive(on: type[Model], field: str, attribute: str) -> Rule:
    """A duration, where given, is above zero."""
    return Rule(
        on=on,
        field=f".{field}",
        cel=f"!has(self.{field}) || self.{field} > duration('0s')",
        holds=lambda m: getattr(m, attribute) is None or seconds(getattr(m, attribute)) > 0,
        message=f"{field} must be above 0: write a duration such as 50ms, 30s or 5m",
    )


def _inside(on: type[Model], what: str) -> Rule:
    """A path without `..`, so that it stays where it says."""
    is_absent = "" if on.model_fields["path"].is_required() else "!has(self.path) || "
    return Rule(
        on=on,
        field=".path",
        cel=f"{is_absent}!self.path.split('/').exists(part, part == '..')",
        holds=lambda source: ".." not in (source.path or "").split("/"),
        message=f"path must not contain '..': write the folder {what} without it",
    )


def _exactly_one(on: type[Model], subject: str, advice: str) -> Rule:
    """One of the model's fields, which all are optional."""
    fields = [field.alias or name for name, field in on.model_fields.items()]
    return Rule(
        on=on,
        cel=f"[{', '.join(f'has(self.{field})' for field in fields)}].exists_one(given, given)",
        holds=lambda model: [getattr(model, name) is not None for name in on.model_fields].count(True) == 1,
        message=f"{subject} must hold exactly one of {', '.join(fields)}: {advice}",
    )


def _draft_windows_fit(spec: SpeculativeServiceSpec) -> bool:
    longest = spec.engine.max_model_len
    models = [drafter.draft_model for drafter in spec.draft_pool if drafter.draft_model is not None]
    return longest is None or all((model.window_tokens or 0) <= longest for model in models)


def _self_windows_fit(spec: SpeculativeServiceSpec) -> bool:
    longest = spec.engine.max_model_len
    blocks = [drafter.sparse_self for drafter in spec.draft_pool if drafter.sparse_self is not None]
    return longest is None or all(block.tokens <= longest for block in blocks)


def _windows_served(spec: SpeculativeServiceSpec) -> bool:
    models = [drafter.draft_model for drafter in spec.draft_pool if drafter.draft_model is not None]
    return spec.engine.backend is Backend.VLLM or all(model.window_tokens is None for model in models)


def _gpu_limits(spec: SpeculativeServiceSpec) -> bool:
    resources = spec.pod_template.resources
    return resources is None or spec.accelerator.resource_name not in {*resources.limits, *resources.requests}


def _gpu_absent(block: str) -> str:
    where = f"self.podTemplate.resources.{block}"
    return f"(!has(self.podTemplate.resources) || !has({where}) || !(self.accelerator.resourceName in {where}))"


_SERVICE_RULES = (
    Rule(
        on=SpeculativeService,
        field=".metadata.name",
        cel=f"self.metadata.name.matches('{SERVICE_NAME_PATTERN}')",
        holds=lambda service: re.fullmatch(SERVICE_NAME_PATTERN, service.metadata.name) is not None,
        message=(
            "metadata.name must be at most 40 lower-case letters, digits and '-', begin with a letter and not end "
            "with '-' (it names the Service and the pods): choose another name"
        ),
    ),
)

_MODEL_RULES = (
    _exactly_one(ModelSource, "source", "keep the one that the weights come from"),
    _exactly_one(CABundle, "caBundle", "keep the one with the certificates"),
    Rule(
        on=SpeculativeServiceSpec,
        field=".target.source.s3",
        cel="self.engine.backend == 'vLLM' || !has(self.target.source.s3)",
        holds=lambda s: s.engine.backend is Backend.VLLM or s.target.source.s3 is None,
        message="source.s3 needs engine.backend vLLM, whose streamer reads buckets: use another source, or set it",
    ),
    Rule(
        on=ModelRef,
        field=".revision",
        cel="!has(self.revision) || has(self.source.hub)",
        holds=lambda m: m.revision is None or m.source.hub is not None,
        message="revision is read from the hub only: remove it, or use source.hub",
    ),
    _inside(PvcSource, "inside the volume"),
    _inside(OciSource, "inside the image"),
    _inside(HostPathSource, "on the node"),
    _inside(HostPathVolume, "on the node"),
    _exactly_one(ModelCache, "modelCache", "keep one"),
)

_ADAPTER_RULES = (
    _exactly_one(AdapterVolume, "volume", "keep the one with the adapters"),
    _exactly_one(AdapterSource, "source of an adapter", "keep the one that it comes from"),
    _inside(AdapterFolder, "inside engine.lora.volume"),
    Rule(
        on=SpeculativeServiceSpec,
        field=".adapters",
        cel="!has(self.adapters) || self.adapters.size() == 0 || has(self.engine.lora)",
        holds=lambda s: not s.adapters or s.engine.lora is not None,
        message="adapters need engine.lora, which reserves memory for them: add it (it may be empty), or remove them",
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".adapters",
        cel=(
            "!has(self.adapters) || !has(self.engine.lora) || has(self.engine.lora.volume) "
            "|| !self.adapters.exists(a, has(a.source.folder))"
        ),
        holds=lambda s: (
            s.engine.lora is None
            or s.engine.lora.volume is not None
            or all(a.source.folder is None for a in s.adapters)
        ),
        message="an adapter with source.folder needs engine.lora.volume, the volume with the folder: add it",
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".adapters",
        cel=(
            "!has(self.adapters) || self.adapters.all(a, a.name != self.target.name "
            "&& (!has(self.engine.servedModelNames) || !(a.name in self.engine.servedModelNames)))"
        ),
        holds=lambda s: all(a.name not in (s.target.name, *s.engine.served_model_names) for a in s.adapters),
        message="an adapter must not have a name of the target (target.name, engine.servedModelNames): choose another",
    ),
)

_POOL_RULES = (
    *(rule for method, (block, attribute) in _BLOCKS.items() for rule in _method_rules(method, block, attribute)),
    Rule(
        on=PromptLookup,
        field=".minTokens",
        cel="self.minTokens <= self.maxTokens",
        holds=lambda p: p.min_tokens <= p.max_tokens,
        message="minTokens must not exceed maxTokens: lower minTokens or raise maxTokens",
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".draftPool",
        cel="!has(self.draftPool) || self.draftPool.filter(d, d.method == 'MTP').size() <= 1",
        holds=lambda s: sum(d.method is DraftMethod.MTP for d in s.draft_pool) <= 1,
        message="draftPool may hold one MTP drafter, the target has one set of layers: remove the others",
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".draftPool",
        cel="!has(self.draftPool) || self.draftPool.filter(d, d.method == 'PromptLookup').size() <= 1",
        holds=lambda s: sum(d.method is DraftMethod.PROMPT_LOOKUP for d in s.draft_pool) <= 1,
        message="draftPool may hold one PromptLookup drafter in this release: remove the others",
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".draftPool",
        cel=(
            "!has(self.draftPool) || !has(self.engine.maxModelLen) || self.draftPool.all(d, !has(d.sparseSelf) || "
            "d.sparseSelf.sinkTokens + d.sparseSelf.windowTokens <= self.engine.maxModelLen)"
        ),
        holds=_self_windows_fit,
        message=(
            "sinkTokens and windowTokens of a drafter must together not exceed engine.maxModelLen: lower them, or "
            "raise maxModelLen"
        ),
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".draftPool",
        cel=(
            "!has(self.draftPool) || !has(self.engine.maxModelLen) || self.draftPool.all(d, !has(d.draftModel) || "
            "!has(d.draftModel.windowTokens) || d.draftModel.windowTokens <= self.engine.maxModelLen)"
        ),
        holds=_draft_windows_fit,
        message="windowTokens of a drafter must not exceed engine.maxModelLen: lower it, or raise maxModelLen",
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".draftPool",
        cel=(
            "!has(self.draftPool) || !self.draftPool.exists(d, has(d.sparseSelf) || "
            f"(has(d.draftModel) && has(d.draftModel.windowTokens))) || {cel_sets_none((_SPLIT_KV,), 'self.engine')}"
        ),
        holds=lambda s: all(drafter.window is None for drafter in s.draft_pool) or sets_none((_SPLIT_KV,), s.engine),
        message=(
            f"a drafter with windowTokens cannot run where {_SPLIT_KV} splits each request's KV: remove the "
            "argument from engine.extraArgs, or the drafter"
        ),
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".draftPool",
        cel=(
            f"self.engine.backend == '{Backend.VLLM}' || !has(self.draftPool) || "
            "self.draftPool.all(d, !has(d.draftModel) || !has(d.draftModel.windowTokens))"
        ),
        holds=_windows_served,
        message="draftModel.windowTokens needs engine.backend vLLM: set it, or remove windowTokens",
    ),
    _served_by(DraftMethod.SPARSE_SELF, Backend.VLLM, "the Torch backend has no windows"),
    _served_by(DraftMethod.BLOCK, Backend.VLLM, "the Torch backend has no block drafters"),
    _served_by(DraftMethod.MTP, Backend.VLLM, "the Torch backend loads no MTP layers"),
    _served_by(DraftMethod.MEDUSA, Backend.TORCH, "vLLM's model runner has no Medusa heads"),
    Rule(
        on=SpeculativeServiceSpec,
        field=".speculation.mode",
        cel="self.speculation.mode != 'Static' || (has(self.draftPool) && self.draftPool.size() > 0)",
        holds=lambda s: s.speculation.mode != SpeculationMode.STATIC or len(s.draft_pool) > 0,
        message="mode Static needs a drafter: add one to spec.draftPool, or use ClosedLoop or 'Off'",
    ),
)

_ACCELERATOR_RULES = (
    Rule(
        on=Accelerator,
        field=".products",
        cel="self.products.all(p, self.products.exists_one(q, q == p))",
        holds=lambda a: len(set(a.products)) == len(a.products),
        message="products must not name a product twice: remove the repetition",
    ),
    Rule(
        on=Accelerator,
        field=".products",
        cel=f"!('{CPU_PRODUCT}' in self.products) || self.products.size() == 1",
        holds=lambda a: CPU_PRODUCT not in a.products or len(a.products) == 1,
        message="products must not mix cpu with GPUs: make a second SpeculativeService for cpu",
    ),
    Rule(
        on=Accelerator,
        field=".count",
        cel=f"!has(self.count) || !('{CPU_PRODUCT}' in self.products)",
        holds=lambda a: a.count is None or CPU_PRODUCT not in a.products,
        message="count is for GPUs: remove it on cpu and set podTemplate.resources instead",
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".accelerator.count",
        cel=(
            f"'{CPU_PRODUCT}' in self.accelerator.products || !has(self.accelerator.count) "
            "|| self.accelerator.count * self.engine.nodes == self.engine.tensorParallelSize"
        ),
        holds=lambda s: (
            CPU_PRODUCT in s.accelerator.products
            or s.accelerator.count is None
            or s.accelerator.count * s.engine.nodes == s.engine.tensor_parallel_size
        ),
        message=(
            "accelerator.count must equal engine.tensorParallelSize / engine.nodes (1 when absent): set all, or remove "
            "count"
        ),
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".engine.tensorParallelSize",
        cel=f"!('{CPU_PRODUCT}' in self.accelerator.products) || self.engine.tensorParallelSize == self.engine.nodes",
        holds=lambda s: CPU_PRODUCT not in s.accelerator.products or s.engine.tensor_parallel_size == s.engine.nodes,
        message=(
            "engine.tensorParallelSize must equal engine.nodes (1 when absent) on cpu: remove it, or name GPU products"
        ),
    ),
    Rule(
        on=SpeculativeServiceSpec,
        field=".podTemplate.resources",
        cel=f"{_gpu_absent('limits')} && {_gpu_absent('requests')}",
        holds=_gpu_limits,
        message="podTemplate.resources must not name the GPU resource: set accelerator.count instead",
    ),
)


def _not_over_nodes(field: str, cel: str, holds: Callable[[SpeculativeServiceSpec], bool], message: str) -> Rule:
    """A rule against something that a replica of several pods does not have."""
    return Rule(
        on=SpeculativeServiceSpec,
        field=field,
        cel=f"self.engine.nodes == 1 || {cel}",
        holds=lambda s: s.engine.nodes == 1 or holds(s),
        message=message,
    )


_NODES_RULES = (
    _not_over_nodes(
        ".engine.nodes",
        "self.engine.tensorParallelSize % self.engine.nodes == 0",
        lambda s: s.engine.tensor_parallel_size % s.engine.nodes == 0,
        "engine.tensorParallelSize must be a multiple of engine.nodes, each pod has as many GPUs: change one of them",
    ),
    _not_over_nodes(
        ".engine.nodes",
        f"self.engine.backend == '{Backend.VLLM}'",
        lambda s: s.engine.backend is Backend.VLLM,
        "engine.nodes above 1 needs engine.backend vLLM, the Torch backend has one process: set it, or remove nodes",
    ),
    _not_over_nodes(
        ".engine.nodes",
        "!has(self.engine.lora)",
        lambda s: s.engine.lora is None,
        "engine.nodes above 1 has no LoRA adapters, which are loaded into one pod: remove engine.lora, or nodes",
    ),
    _not_over_nodes(
        ".engine.extraArgs",
        f"({cel_sets_none((EXECUTOR,), 'self.engine')})",
        lambda s: sets_none((EXECUTOR,), s.engine),
        f"extraArgs must not set {EXECUTOR} where engine.nodes is above 1: remove the argument, Outrider sets it",
    ),
    _not_over_nodes(
        ".accelerator.products",
        "self.accelerator.products.size() == 1",
        lambda s: len(s.accelerator.products) == 1,
        "engine.nodes above 1 needs one product, all pods of a group have the same: make a service for each product",
    ),
    _not_over_nodes(
        ".rollout.strategy",
        f"self.rollout.strategy != '{RolloutStrategy.DRAFT_CANARY}'",
        lambda s: s.rollout.strategy is not RolloutStrategy.DRAFT_CANARY,
        "strategy DraftCanary measures in one pod, and engine.nodes above 1 has groups of pods: use RollingUpdate",
    ),
    _not_over_nodes(
        ".profiling.mode",
        f"self.profiling.mode != '{ProfilingMode.REQUIRED}'",
        lambda s: s.profiling.mode is not ProfilingMode.REQUIRED,
        "profiling.mode Required needs a Job of one pod that holds the target, and engine.nodes is above 1: use Skip",
    ),
)

_LATENCY_RULES = (
    _positive(SLOClassSpec, "tpot", "tpot"),
    _positive(SLOClassSpec, "ttft", "ttft"),
    Rule(
        on=SpeculativeServiceSpec,
        field=".defaultSLOClass",
        cel=(
            "!has(self.defaultSLOClass) "
            "|| (has(self.sloClasses) && self.sloClasses.exists(c, c.name == self.defaultSLOClass))"
        ),
        holds=lambda s: s.default_slo_class is None or s.default_slo_class in [c.name for c in s.slo_classes],
        message="defaultSLOClass must be the name of one of spec.sloClasses: add the class or correct the name",
    ),
)

_PROCESS_RULES = (
    _positive(Profiling, "maxAge", "max_age"),
    _positive(Profiling, "timeBudget", "time_budget"),
    Rule(
        on=Profiling,
        field=".timeBudget",
        cel="self.timeBudget <= self.timeout",
        holds=lambda p: seconds(p.time_budget) <= seconds(p.timeout),
        message="timeBudget must not exceed timeout, which also covers loading the model: raise timeout",
    ),
    Rule(
        on=Rollout,
        field=".maxUnavailable",
        cel="self.maxSurge > 0 || self.maxUnavailable > 0",
        holds=lambda r: r.max_surge > 0 or r.max_unavailable > 0,
        message="maxSurge and maxUnavailable must not both be 0: set maxUnavailable to 1 where no GPU is free",
    ),
    Rule(
        on=Rollout,
        field=".progressDeadline",
        cel="self.progressDeadline >= duration('10s')",
        holds=lambda r: seconds(r.progress_deadline) >= 10,
        message="progressDeadline must be at least 10s, the time a pod has to get ready: write a longer one",
    ),
    Rule(
        # A rule for every duration: the API server's own type check lets a list through where a format is given.
        on=Rollout,
        field=".drainTimeout",
        cel="self.drainTimeout <= duration('24h')",
        holds=lambda r: seconds(r.drain_timeout) <= 24 * 3600,
        message="drainTimeout must be at most 24h, for the old pod holds its hardware so long: write a shorter one",
    ),
    Rule(
        on=RolloutCanary,
        field=".timeout",
        cel="self.timeout >= duration('1m') && self.timeout <= duration('168h')",
        holds=lambda c: 60 <= seconds(c.timeout) <= 168 * 3600,
        message="timeout of the canary must be 1m to 168h: requests decide, and it only ends what stays open",
    ),
)

RULES: tuple[Rule, ...] = (
    *_SERVICE_RULES, *_MODEL_RULES, *_ADAPTER_RULES, *_POOL_RULES, *_ACCELERATOR_RULES, *_NODES_RULES, *_LATENCY_RULES,
    *_PROCESS_RULES, *ENGINE_RULES, *POD_RULES, *RESOURCE_RULES, *SCHEDULING_RULES,
)  # fmt: skip


def rules_of(model: type[Model]) -> list[Rule]:
    """The rules that belong to `model`."""
    return [rule for rule in RULES if rule.on is model]


def violations(model: Model, path: str = "") -> Iterator[str]:
    """A sentence for each rule that `model`, or a part of it, breaks: "spec.rollout.maxSurge: ..."."""
    for rule in rules_of(type(model)):
        if not rule.holds(model):
            yield f"{(path + rule.field).lstrip('.') or 'manifest'}: {rule.message}"
    for name, field in type(model).model_fields.items():
        yield from _violations_below(getattr(model, name), f"{path}.{field.alias or name}")


def _violations_below(value: object, path: str) -> Iterator[str]:
    if isinstance(value, Model):
        yield from violations(value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _violations_below(item, f"{path}[{index}]")
