"""Rules for tolerations and node labels of `accelerator`, which Kubernetes would refuse in a pod."""

from __future__ import annotations

from outrider_crds.rule import Rule, label_keys
from outrider_crds.scheduling import Toleration
from outrider_crds.spec import Accelerator

SCHEDULING_RULES = (
    label_keys(Accelerator, "nodeSelector", "node_selector"),
    Rule(
        on=Toleration,
        field=".key",
        cel="has(self.key) || (has(self.operator) && self.operator == 'Exists')",
        holds=lambda t: t.key is not None or t.operator == "Exists",
        message="a toleration without a key needs the operator Exists: add one of them",
    ),
    Rule(
        on=Toleration,
        field=".value",
        cel="!has(self.value) || self.value == '' || !has(self.operator) || self.operator != 'Exists'",
        holds=lambda t: not t.value or t.operator != "Exists",
        message="a toleration with the operator Exists takes no value: remove it, or use Equal",
    ),
    Rule(
        on=Toleration,
        field=".tolerationSeconds",
        cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        holds=lambda t: t.toleration_seconds is None or t.effect == "NoExecute",
        message="tolerationSeconds needs the effect NoExecute: add it, or remove tolerationSeconds",
    ),
)
