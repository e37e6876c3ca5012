"""Rules for `workload.existing`: what belongs to the workload that makes the pods cannot be set here."""

from __future__ import annotations

import json

from outrider_crds.base import Model
from outrider_crds.existing_pods import PodSelector
from outrider_crds.pod_template import PodTemplate
from outrider_crds.rollout_settings import RolloutStrategy
from outrider_crds.rule import Rule, label_keys
from outrider_crds.spec import Engine, MetricsSource, ProfilingMode, SpeculativeServiceSpec

_NEURAL_BLOCKS = ("draftModel", "eagle", "block")


def _unset(block: str, model: type[Model]) -> str:
    """CEL: every declared field of a block has its default."""
    fields = {name: field for name, field in model.model_fields.items() if name != "others"}
    return " && ".join(_is_default(f"self.{block}.{f.alias or name}", f.default) for name, f in fields.items())


def _is_default(path: str, default: object) -> str:
    if default is None:
        return f"!has({path})"
    if isinstance(default, list | dict):
        return f"(!has({path}) || {path}.size() == 0)"
    return f"{path} == {json.dumps(default)}"


def _readable_in_pods(drafter: str) -> str:
    """CEL: the model of a drafter comes from nothing that Outrider would have to mount or pass on."""
    models = [(f"{drafter}.{block}", f"{drafter}.{block}.model.source") for block in _NEURAL_BLOCKS]
    return " && ".join(
        f"(!has({block}) || (!has({source}.pvc) && !has({source}.oci) "
        f"&& (!has({source}.hub) || !has({source}.hub.tokenSecretRef))))"
        for block, source in models
    )


PODS_ARE_THEIRS = "podTemplate must be absent with workload.existing: change the pods where they are made"
_RULES = (
    (".replicas", "self.replicas == 1", "replicas must be absent", "scale the workload that makes the pods"),
    (".engine", _unset("engine", Engine), "engine must be absent", "vllm serve has its own flags in the pods"),
    (
        ".modelCache", "!has(self.modelCache.pvc) && !has(self.caBundle)",
        "modelCache.pvc and caBundle must be absent", "mount them where the pods are made",
    ),
    (
        ".gateway.inferencePool", "!has(self.gateway.inferencePool) || !self.gateway.inferencePool",
        "gateway.inferencePool must be false", "the platform routes to the pods",
    ),
    (
        ".rollout.strategy", f"self.rollout.strategy != '{RolloutStrategy.DRAFT_CANARY}'",
        "strategy DraftCanary must not be set", "a canary needs a pod that Outrider makes",
    ),
    (
        ".profiling.mode", f"self.profiling.mode != '{ProfilingMode.REQUIRED}'",
        "profiling.mode Required must not be set", "the pods start without asking Outrider",
    ),
    (".paused", "!self.paused", "paused must be false", "there is no rollout to stop; set speculation.mode"),
    (
        ".metrics.source", f"self.metrics.source == '{MetricsSource.PODS}'",
        "metrics.source must be Pods", "series of the pods do not name this service",
    ),
    (
        ".draftPool", "has(self.draftPool) && self.draftPool.size() > 0",
        "draftPool must name drafters", "move that of the pods' --speculative-config here",
    ),
    (
        ".draftPool", f"!has(self.draftPool) || self.draftPool.all(d, {_readable_in_pods('d')})",
        "a draft must come from hub without tokenSecretRef, s3 or hostPath (a folder of the container)",
        "mount a claim or image in the pods, and set their HF_TOKEN",
    ),
)  # fmt: skip
"""What a service that selects pods must leave alone: field, CEL, and two halves of the sentence."""

WORKLOAD_RULES: tuple[Rule, ...] = (
    label_keys(PodSelector, "matchLabels"),
    Rule(
        SpeculativeServiceSpec,
        ".workload",
        "has(self.workload) == has(oldSelf.workload)",
        "workload can neither be added to a service nor removed: delete the service and apply it again",
    ),
    Rule(
        SpeculativeServiceSpec,
        ".podTemplate",
        f"!has(self.workload) || ({_unset('podTemplate', PodTemplate)})",
        PODS_ARE_THEIRS,
    ),
    *(
        Rule(
            SpeculativeServiceSpec, field, f"!has(self.workload) || ({cel})", f"{what} with workload.existing: {remedy}"
        )
        for field, cel, what, remedy in _RULES
    ),
)
