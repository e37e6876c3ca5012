"""The children that serve: which to create, which to apply again, which to delete."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.runtime_config import PRODUCT_ANNOTATION

from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.ownership import Ownership, ownership
from outrider_operator.decide.reading import annotation, is_being_deleted, name_of, text, uid_of
from outrider_operator.decide.revisions import Revision, revision_map, unneeded_maps
from outrider_operator.decide.workloads.deployment import deployment
from outrider_operator.decide.workloads.services import (
    disruption_budget,
    hot_map,
    network_policy,
    network_policy_name,
    service,
    service_account,
)
from outrider_operator.model import CONFIG_MAP, NETWORK_POLICY, Annotate, Delete, Object, Observed, Settings

_GARBAGE_COLLECTION_S = 2.0


@dataclass(frozen=True)
class WorkloadPlan:
    create: tuple[Object, ...] = ()
    apply: tuple[Object, ...] = ()
    annotate: tuple[Annotate, ...] = ()
    delete: tuple[Delete, ...] = ()
    requeue_after_s: float | None = None


def plan_workloads(observed: Observed, settings: Settings, intent: Intent) -> WorkloadPlan:
    """Children that are missing or differ. One that garbage collection is about to take is made anew after it."""
    desired = [stamp(child) for child in _desired(observed, settings, intent)]
    leaving = [child for child in desired if _ownership(observed, child) is Ownership.LEAVING]
    # A policy of that name which is not the service's is not observed: created, never applied over.
    new = [child for child in desired if child["kind"] == NETWORK_POLICY and _present(observed, child) is None]
    settled = [child for child in desired if child not in leaving and child not in new]
    applies = [child for child in settled if needs_apply(_present(observed, child), child)]
    running = intent.running or intent.wanted
    return WorkloadPlan(
        create=(*_missing_revision(observed, intent.running), *new),
        apply=tuple(applies),
        annotate=tuple(_products(observed, intent)),
        delete=tuple(
            Delete(each["kind"], name_of(each), uid_of(each))
            for each in (*unneeded_maps(observed, running), *_unwanted_policy(observed, settings))
        ),
        requeue_after_s=_GARBAGE_COLLECTION_S if leaving else None,
    )


def _unwanted_policy(observed: Observed, settings: Settings) -> list[Object]:
    """The service's NetworkPolicy, once the chart asks for none."""
    policy = observed.children.get((NETWORK_POLICY, network_policy_name(observed.name)))
    ours = ownership(policy, observed) is Ownership.OURS
    return [policy] if policy is not None and ours and not settings.admin_port_peers else []


def _desired(observed: Observed, settings: Settings, intent: Intent) -> list[Object]:
    children = [
        service_account(observed),
        hot_map(observed, intent.hot),
        service(observed),
        disruption_budget(observed),
    ]
    if settings.admin_port_peers:
        children.append(network_policy(observed, settings.admin_port_peers))
    if intent.running is None:  # nothing to run yet: the first revision waits for a profile that is required
        return children
    return [*children, deployment(observed, intent, intent.running)]


def _missing_revision(observed: Observed, revision: Revision | None) -> tuple[Object, ...]:
    if revision is None or (CONFIG_MAP, f"{observed.name}-{revision.name}") in observed.children:
        return ()
    return (revision_map(revision, observed),)


def _products(observed: Observed, intent: Intent) -> list[Annotate]:
    """Pods that have a node and do not know its product yet; the node's label names it."""
    nodes = {node.name: node for node in observed.nodes or ()}
    marks: list[Annotate] = []
    for pod in observed.pods:
        node = nodes.get(text(pod, "spec", "nodeName"))
        if node is None or annotation(pod, PRODUCT_ANNOTATION) or is_being_deleted(pod):
            continue
        product = node.labels.get(intent.spec.accelerator.product_label)
        if product:
            marks.append(Annotate(name_of(pod), uid_of(pod), {PRODUCT_ANNOTATION: product}))
    return marks


def _present(observed: Observed, child: Object) -> Object | None:
    return observed.children.get((child["kind"], child["metadata"]["name"]))


def _ownership(observed: Observed, child: Object) -> Ownership:
    return ownership(_present(observed, child), observed)
