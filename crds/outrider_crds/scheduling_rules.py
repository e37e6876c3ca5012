"""Rules for tolerations, affinity and spread: what Kubernetes would refuse in a pod."""

from __future__ import annotations

import re

from outrider_crds.rule import Rule, cel_pattern, label_keys
from outrider_crds.scheduling import (
    LabelRequirement,
    LabelSelector,
    NodeRequirement,
    Toleration,
    TopologySpreadConstraint,
    Unsatisfiable,
)
from outrider_crds.spec import Accelerator

_COUNT = "^[0-9]{1,9}$"


SCHEDULING_RULES = (
    label_keys(Accelerator, "nodeSelector", "node_selector"),
    label_keys(LabelSelector, "matchLabels", "match_labels"),
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
    *(
        Rule(
            on=on,
            field=".values",
            cel=(
                "self.operator in ['Exists', 'DoesNotExist'] "
                "? !has(self.values) || self.values.size() == 0 : has(self.values) && self.values.size() > 0"
            ),
            holds=lambda r: bool(r.values) == (r.operator not in ("Exists", "DoesNotExist")),
            message="Exists and DoesNotExist take no values, the other operators need some: correct one of the two",
        )
        for on in (LabelRequirement, NodeRequirement)
    ),
    Rule(
        on=NodeRequirement,
        field=".values",
        cel=(
            "!(self.operator in ['Gt', 'Lt']) "
            f"|| (has(self.values) && self.values.size() == 1 && self.values[0].matches({cel_pattern(_COUNT)}))"
        ),
        holds=lambda r: (
            r.operator not in ("Gt", "Lt") or (len(r.values) == 1 and re.fullmatch(_COUNT, r.values[0]) is not None)
        ),
        message="Gt and Lt take one whole number: write it in quotes as the only value",
    ),
    Rule(
        on=TopologySpreadConstraint,
        field=".minDomains",
        cel="!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
        holds=lambda c: c.min_domains is None or c.when_unsatisfiable is Unsatisfiable.DO_NOT_SCHEDULE,
        message="minDomains needs whenUnsatisfiable: DoNotSchedule: change it, or remove minDomains",
    ),
    Rule(
        on=TopologySpreadConstraint,
        field=".matchLabelKeys",
        cel=(
            "!has(self.matchLabelKeys) || self.matchLabelKeys.size() == 0 || (has(self.labelSelector) "
            "&& self.matchLabelKeys.all(k, (!has(self.labelSelector.matchLabels) "
            "|| !(k in self.labelSelector.matchLabels)) && (!has(self.labelSelector.matchExpressions) "
            "|| !self.labelSelector.matchExpressions.exists(e, e.key == k))))"
        ),
        holds=lambda c: not c.match_label_keys or _apart(c.match_label_keys, c.label_selector),
        message="matchLabelKeys needs a labelSelector, and keys that stand in none of its parts: correct one of them",
    ),
)


def _apart(keys: list[str], selector: LabelSelector | None) -> bool:
    if selector is None:
        return False
    return not set(keys) & {*selector.match_labels, *(e.key for e in selector.match_expressions)}
