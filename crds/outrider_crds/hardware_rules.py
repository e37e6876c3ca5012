"""Rules for the accelerator, and for replicas of several pods."""

from __future__ import annotations

from outrider_crds.engine_rules import EXECUTOR, cel_sets_none
from outrider_crds.pod_template import Toleration
from outrider_crds.rollout_settings import RolloutStrategy
from outrider_crds.rule import Rule, label_keys, rules_on
from outrider_crds.spec import CPU_PRODUCT, Accelerator, Backend, ProfilingMode, SpeculativeServiceSpec

ON_CPU = f"'{CPU_PRODUCT}' in self.accelerator.products"


def _gpu_absent(block: str) -> str:
    where = f"self.podTemplate.resources.{block}"
    return f"(!has(self.podTemplate.resources) || !has({where}) || !(self.accelerator.resourceName in {where}))"


_ACCELERATOR_RULES = (
    *rules_on(
        Accelerator,
        (
            ".products",
            "self.products.all(p, self.products.exists_one(q, q == p))",
            "products must not name a product twice: remove the repetition",
        ),
        (
            ".products",
            f"!('{CPU_PRODUCT}' in self.products) || self.products.size() == 1",
            "products must not mix cpu with GPUs: make a second SpeculativeService for cpu",
        ),
        (
            ".count",
            f"!has(self.count) || !('{CPU_PRODUCT}' in self.products)",
            "count is for GPUs: remove it on cpu and set podTemplate.resources instead",
        ),
        (
            ".resourceName",
            "!self.resourceName.contains('kubernetes.io/') && !self.resourceName.startsWith('requests.')",
            "resourceName must be a device plugin's resource such as nvidia.com/gpu, not one of Kubernetes' own",
        ),
    ),
    label_keys(Accelerator, "nodeSelector"),
    *rules_on(
        Toleration,
        (
            ".key",
            "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
            "a toleration without a key needs the operator Exists: add one of them",
        ),
        (
            ".value",
            "!has(self.value) || self.value == '' || !has(self.operator) || self.operator != 'Exists'",
            "a toleration with the operator Exists takes no value: remove it, or use Equal",
        ),
        (
            ".tolerationSeconds",
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "tolerationSeconds needs the effect NoExecute: add it, or remove tolerationSeconds",
        ),
    ),
    *rules_on(
        SpeculativeServiceSpec,
        (
            ".accelerator.count",
            f"{ON_CPU} || !has(self.accelerator.count) "
            "|| self.accelerator.count * self.engine.nodes == self.engine.tensorParallelSize",
            "accelerator.count must equal engine.tensorParallelSize / engine.nodes (1 when absent): set all, or remove "
            "count",
        ),
        (
            ".engine.tensorParallelSize",
            f"!({ON_CPU}) || self.engine.tensorParallelSize == self.engine.nodes",
            "engine.tensorParallelSize must equal engine.nodes (1 when absent) on cpu: remove it, or name GPU products",
        ),
        (
            ".podTemplate.resources",
            f"{_gpu_absent('limits')} && {_gpu_absent('requests')}",
            "podTemplate.resources must not name the GPU resource: set accelerator.count instead",
        ),
    ),
)


def _not_over_nodes(field: str, cel: str, message: str) -> tuple[str, str, str]:
    """A rule against something that a replica of several pods does not have."""
    return (field, f"self.engine.nodes == 1 || {cel}", message)


_NODES_RULES = rules_on(
    SpeculativeServiceSpec,
    _not_over_nodes(
        ".engine.nodes",
        "self.engine.tensorParallelSize % self.engine.nodes == 0",
        "engine.tensorParallelSize must be a multiple of engine.nodes, each pod has as many GPUs: change one of them",
    ),
    _not_over_nodes(
        ".engine.nodes",
        f"self.engine.backend == '{Backend.VLLM}'",
        "engine.nodes above 1 needs engine.backend vLLM, the Torch backend has one process: set it, or remove nodes",
    ),
    _not_over_nodes(
        ".engine.nodes",
        "!has(self.engine.lora)",
        "LoRA adapters need engine.nodes 1: remove engine.lora, or nodes",
    ),
    _not_over_nodes(
        ".engine.extraArgs",
        f"({cel_sets_none((EXECUTOR,), 'self.engine')})",
        f"extraArgs must not set {EXECUTOR} where engine.nodes is above 1: remove the argument, Outrider sets it",
    ),
    _not_over_nodes(
        ".accelerator.products",
        "self.accelerator.products.size() == 1",
        "engine.nodes above 1 needs one product, all pods of a group have the same: make a service for each product",
    ),
    _not_over_nodes(
        ".rollout.strategy",
        f"self.rollout.strategy != '{RolloutStrategy.DRAFT_CANARY}'",
        "strategy DraftCanary measures in one pod, and engine.nodes above 1 has groups of pods: use RollingUpdate",
    ),
    _not_over_nodes(
        ".profiling.mode",
        f"self.profiling.mode != '{ProfilingMode.REQUIRED}'",
        "profiling.mode Required needs a Job of one pod that holds the target, and engine.nodes is above 1: use Skip",
    ),
)

HARDWARE_RULES: tuple[Rule, ...] = (*_ACCELERATOR_RULES, *_NODES_RULES)
