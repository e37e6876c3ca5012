"""Reasons why a cluster cannot have the groups of pods that a spec asks for."""

from __future__ import annotations

from outrider_crds.spec import SpeculativeServiceSpec
from outrider_crds.status import ConditionReason

from outrider_operator.cluster_model import KUBERNETES_SERVICE, LEADER_WORKER_SET, KindAccess, groups_name
from outrider_operator.decide.ownership import Children, controller_name
from outrider_operator.decide.specification import name_conflict
from outrider_operator.decide.verdict import Verdict, false


def no_groups(spec: SpeculativeServiceSpec, access: KindAccess) -> Verdict | None:
    """Why this cluster cannot have groups that the spec asks for; None if it can, or if the spec asks for none."""
    if spec.engine.nodes == 1 or access in (KindAccess.SERVED, KindAccess.UNKNOWN):
        return None
    if access is KindAccess.FORBIDDEN:
        what = "This operator has no right to read LeaderWorkerSets: install the chart of its own release."
        return false(ConditionReason.CHILD_REJECTED, what)
    return false(
        ConditionReason.NOT_INSTALLED,
        "engine.nodes is above 1, and this cluster does not have LeaderWorkerSets (leaderworkerset.x-k8s.io/v1): "
        "install LWS, or set engine.nodes to 1.",
    )


def no_names(spec: SpeculativeServiceSpec, children: Children) -> Verdict | None:
    """A conflict if a Service that is not of the LeaderWorkerSet has its name; LWS takes any for its headless Service.

    No pod would have a DNS name then, so workers would never find their leader.
    """
    key = KUBERNETES_SERVICE, groups_name(children.owner.name)
    document = children.documents.get(key)
    if spec.engine.nodes == 1 or document is None:
        return None
    is_of_groups = controller_name(document) == f"{LEADER_WORKER_SET} {key[1]}"
    return None if is_of_groups else name_conflict(key, document)
