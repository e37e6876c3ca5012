"""The children that serve: which to create, which to apply again, which to delete."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider_crds.runtime_config import PRODUCT_ANNOTATION

from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.intent import Intent
from outrider_operator.decide.ownership import Children, Ownership, owner_reference
from outrider_operator.decide.revisions import (
    current_revision_name,
    orphaned_maps,
    revision_map,
    unneeded_maps,
)
from outrider_operator.decide.workloads.deployment import deployment
from outrider_operator.decide.workloads.services import (
    disruption_budget,
    hot_map,
    network_policy,
    network_policy_name,
    service,
    service_account,
)
from outrider_operator.inbound.reading import annotation, is_being_deleted, name_of, text, uid_of
from outrider_operator.model import (
    CONFIG_MAP,
    NETWORK_POLICY,
    SERVICE_ACCOUNT,
    SERVING,
    Node,
    Object,
    Rejection,
    hot_map_name,
)
from outrider_operator.plan import Adoption, Annotate, Delete, fingerprint

_GARBAGE_COLLECTION_S = 2.0


@dataclass(frozen=True)
class WorkloadPlan:
    create: tuple[Object, ...] = ()
    apply: tuple[Object, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    delete: tuple[Delete, ...] = ()
    requeue_after_s: float | None = None


@dataclass(frozen=True)
class Further:
    """What a draft canary adds to the children."""

    desired: tuple[Object, ...] = ()
    """Stamped objects that there should be."""
    unwanted: tuple[Object, ...] = ()
    """Objects that there should not be any more."""
    revisions: frozenset[str] = frozenset()
    """Names of revisions whose ConfigMaps stay."""


def plan_workloads(
    children: Children,
    asked: Intent,
    in_use: set[str],
    admin_port_peers: tuple[Object, ...],
    further: Further = Further(),
) -> WorkloadPlan:
    """Children that are missing or differ. One that garbage collection is about to take is made anew after it, as is an
    immutable one that is not what it should be.

    `in_use` holds the names of the revisions that ReplicaSets and pods still have.
    """
    desired = [*_desired(children, asked, admin_port_peers), *further.desired]
    owned = {id(child): children.ownership(*_key(child)) for child in desired}
    absent = [child for child in desired if owned[id(child)] is Ownership.ABSENT]
    present = [child for child in desired if owned[id(child)] is Ownership.OURS]
    needed = {asked.wanted.name, current_revision_name(children), *in_use, *further.revisions}
    differing = [child for child in present if needs_apply(children.own(*_key(child)), child)]
    immutable = [own for child in differing if (own := children.own(*_key(child)) or {}).get("immutable")]
    policies = _unwanted_policy(children, admin_port_peers)
    unwanted = (*unneeded_maps(children, needed), *policies, *immutable, *further.unwanted)
    return WorkloadPlan(
        create=tuple(absent),
        apply=tuple(_write(children, child) for child in differing if children.own(*_key(child)) not in immutable),
        adopt=tuple(_adoption(children, each) for each in orphaned_maps(children, needed)),
        delete=tuple(Delete(each["kind"], name_of(each), uid_of(each)) for each in unwanted),
        requeue_after_s=_GARBAGE_COLLECTION_S if Ownership.LEAVING in owned.values() else None,
    )


def _adoption(children: Children, document: Object) -> Adoption:
    owner = owner_reference(children.owner, controller=True)
    return Adoption(document["kind"], name_of(document), uid_of(document), owner, component=SERVING)


def rollout_refusal(children: Children, asked: Intent, rejections: Iterable[Rejection]) -> Rejection | None:
    """Why the wanted revision cannot be rolled out: its ConfigMap, or the Deployment that runs it, is refused."""
    if asked.held or current_revision_name(children) == asked.wanted.name:
        return None
    refused = {rejection.write: rejection for rejection in rejections if not rejection.is_stored}
    steps = (revision_map(children.owner, asked.wanted), deployment(children.owner, asked, asked.wanted))
    prints = [fingerprint(_write(children, stamp(step))) for step in steps] if refused else []
    return next((refused[each] for each in prints if each in refused), None)


def plan_products(pods: Iterable[Object], nodes: Iterable[Node], product_label: str) -> tuple[Annotate, ...]:
    """Tells pods that have a node and do not know its product yet; the node's label names it."""
    by_name = {node.name: node for node in nodes}
    marks: list[Annotate] = []
    for pod in pods:
        node = by_name.get(text(pod, "spec", "nodeName"))
        if node is None or annotation(pod, PRODUCT_ANNOTATION) or is_being_deleted(pod):
            continue
        product = node.labels.get(product_label)
        if product:
            marks.append(Annotate(name_of(pod), uid_of(pod), {PRODUCT_ANNOTATION: product}))
    return tuple(marks)


def _unwanted_policy(children: Children, admin_port_peers: tuple[Object, ...]) -> list[Object]:
    """The service's NetworkPolicy, once the chart asks for none."""
    policy = children.own(NETWORK_POLICY, network_policy_name(children.owner.name))
    return [policy] if policy is not None and not admin_port_peers else []


def _desired(children: Children, asked: Intent, admin_port_peers: tuple[Object, ...]) -> list[Object]:
    """The children that can be had now: what a pod mounts is there before the Deployment that makes it. One that runs
    is scaled whatever became of that since."""
    owner, revision = children.owner, asked.running
    desired = [service_account(owner), hot_map(owner, asked.hot), service(owner)]
    desired.append(disruption_budget(owner, asked.unready_canaries))
    if admin_port_peers:
        desired.append(network_policy(owner, admin_port_peers))
    if revision is not None:  # else the first revision has to wait
        maps = [] if revision in asked.stored else [revision_map(owner, revision)]
        desired += maps
        runs = current_revision_name(children) == revision.name
        if runs or _is_mountable(children, [stamp(each) for each in maps]):
            desired.append(deployment(owner, asked, revision))
    return [stamp(child) for child in desired]


def _is_mountable(children: Children, maps: list[Object]) -> bool:
    """Is all there that the Deployment's pods cannot start without, and are `maps` of theirs what they should be?"""
    service = children.owner.name
    shared = ((SERVICE_ACCOUNT, service), (CONFIG_MAP, hot_map_name(service)))
    made = not any(needs_apply(children.own(*_key(each)), each) for each in maps)
    return made and all(children.own(*key) is not None for key in shared)


def _write(children: Children, child: Object) -> Object:
    """`child` as it is sent: to the very object that was seen, or to none."""
    present = children.own(*_key(child))
    return child if present is None else {**child, "metadata": {**child["metadata"], "uid": uid_of(present)}}


def _key(child: Object) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]
