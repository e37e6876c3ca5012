"""The children that serve: their manifests; create missing ones, apply changed ones, delete unwanted ones."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from outrider_crds.runtime_config import ADMIN_PORT, CONFIG_KEY, SERVING_PORT, HotConfig

from outrider_operator.cluster_model import (
    COMPONENT_LABEL,
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    KUBERNETES_SERVICE,
    NETWORK_POLICY,
    SERVICE_ACCOUNT,
    SERVICE_LABEL,
    SERVING,
    WORKER,
    ApiRefusal,
    Object,
    ServiceIdentity,
    groups_name,
    hot_map_name,
)
from outrider_operator.decide.desired import revisions
from outrider_operator.decide.desired.desired_state import DesiredState
from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.outcome import ConcernOutcome, earliest_s
from outrider_operator.decide.ownership import Children, Ownership, child_document, owner_reference, selector
from outrider_operator.decide.workloads.serving_workload import (
    predecessors,
    superseded,
    waits_to_change_kind,
    workload,
)
from outrider_operator.plan import Adoption, Delete, fingerprint
from outrider_operator.validation.reading import name_of, uid_of

_GARBAGE_COLLECTION_S = 2.0


def write_children(children: Children, outcome: ConcernOutcome) -> ConcernOutcome:
    """`outcome` with the writes for its objects: create what is missing, apply what differs, delete what is unwanted.

    A child that garbage collection is about to delete is created afterwards. An immutable child that differs is deleted
    and then created.
    """
    owned = [(child, children.ownership(*_key(child))) for child in outcome.objects]
    absent = [child for child, ownership in owned if ownership is Ownership.ABSENT]
    present = [(child, own) for child, _ in owned if (own := children.own(*_key(child))) is not None]
    differing = [(child, own) for child, own in present if needs_apply(own, child)]
    replaced = [own for _, own in differing if own.get("immutable")]
    is_terminating = any(ownership is Ownership.TERMINATING for _, ownership in owned)
    return replace(
        outcome,
        create=(*absent, *outcome.create),
        apply=(*outcome.apply, *(_write(children, child) for child, own in differing if not own.get("immutable"))),
        delete=(*(_deletion(document) for document in (*replaced, *outcome.unwanted)), *outcome.delete),
        wake_after_s=earliest_s((outcome.wake_after_s, _GARBAGE_COLLECTION_S if is_terminating else None)),
    )


def unneeded_children(
    children: Children, desired: DesiredState, in_use: set[str], objects: list[Object]
) -> ConcernOutcome:
    """`objects`, and the children that are no longer needed. in_use: revisions that pods of any kind still have."""
    running = {revisions.revision_in(workload) for workload in (*children.workloads, children.canary)}
    needed = {desired.spec_revision.name, *running, *in_use}
    policies, replaced = _unwanted_policies(children, objects), superseded(children, desired)
    return ConcernOutcome(
        objects=tuple(objects),
        unwanted=(*revisions.unneeded_maps(children, needed), *policies, *replaced),
        adopt=tuple(_adoption(children, document) for document in revisions.orphaned_maps(children, needed)),
    )


def _deletion(document: Object) -> Delete:
    return Delete(document["kind"], name_of(document), uid_of(document))


def _adoption(children: Children, document: Object) -> Adoption:
    owner = owner_reference(children.owner, controller=True)
    return Adoption(document["kind"], name_of(document), uid_of(document), owner, component=SERVING)


def rollout_refusal(children: Children, desired: DesiredState, refusals: Iterable[ApiRefusal]) -> ApiRefusal | None:
    """Why the revision of the spec cannot be rolled out: its ConfigMap or the workload is refused; else None."""
    if desired.is_waiting or revisions.current_revision_name(children) == desired.spec_revision.name:
        return None
    refused = {refusal.write: refusal for refusal in refusals if not refusal.is_stored}
    steps = (
        revisions.revision_map(children.owner, desired.spec_revision),
        workload(children.owner, desired, desired.spec_revision),
    )
    writes = [fingerprint(_write(children, stamp(step))) for step in steps] if refused else []
    return next((refused[write] for write in writes if write in refused), None)


def _unwanted_policies(children: Children, objects: list[Object]) -> list[Object]:
    """The service's NetworkPolicies that are not among `objects`: the chart no longer enables them, or no group needs
    them."""
    owner = children.owner.name
    present = (children.own(NETWORK_POLICY, name) for name in (network_policy_name(owner), groups_name(owner)))
    desired = {_key(child) for child in objects}
    return [policy for policy in present if policy is not None and _key(policy) not in desired]


def _has_groups(children: Children, revision: revisions.Revision | None) -> bool:
    return children.groups is not None or (revision is not None and revision.boot.engine.nodes > 1)


def serving_objects(children: Children, desired: DesiredState, admin_port_peers: tuple[Object, ...]) -> list[Object]:
    """The children that can exist now. The workload is created only after everything that its pods mount.

    One that runs already is scaled even if a mounted object is gone.
    """
    owner, revision = children.owner, desired.running
    objects = [service_account(owner), hot_map(owner, desired.hot), service(owner)]
    in_groups = _has_groups(children, revision)
    objects.append(disruption_budget(owner, desired.unready_canaries, in_groups=in_groups))
    if admin_port_peers:
        objects.append(network_policy(owner, admin_port_peers, in_groups=in_groups))
        objects += [groups_policy(owner)] if in_groups else []
    if revision is not None:  # None: the first revision must wait
        revision_maps = [] if revision in desired.stored else [revisions.revision_map(owner, revision)]
        objects += revision_maps
        runs = revisions.current_revision_name(children) == revision.name
        is_mountable = runs or _is_mountable(children, [stamp(document) for document in revision_maps])
        if is_mountable and not waits_to_change_kind(children, desired, revision):
            objects.append(workload(owner, desired, revision))
    objects += predecessors(children, desired)
    return [stamp(child) for child in objects]


def _is_mountable(children: Children, maps: list[Object]) -> bool:
    """Does everything exist that the Deployment's pods need to start, and are `maps` up to date?"""
    service = children.owner.name
    made = not any(needs_apply(children.own(*_key(document)), document) for document in maps)
    return made and children.has_account and children.own(CONFIG_MAP, hot_map_name(service)) is not None


def _write(children: Children, child: Object) -> Object:
    """`child` as it is sent. The uid makes the write fail if the object was replaced meanwhile."""
    present = children.own(*_key(child))
    return child if present is None else {**child, "metadata": {**child["metadata"], "uid": uid_of(present)}}


def _key(child: Object) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]


def service_account(owner: ServiceIdentity) -> Object:
    """A ServiceAccount without rights or token: pods do not talk to the API server."""
    return child_document(owner, SERVICE_ACCOUNT, owner.name, automountServiceAccountToken=False)


def hot_map(owner: ServiceIdentity, hot: HotConfig) -> Object:
    data = {CONFIG_KEY: json.dumps(hot.wire(), indent=1, sort_keys=True)}
    return child_document(owner, CONFIG_MAP, hot_map_name(owner.name), data=data)


def service(owner: ServiceIdentity) -> Object:
    """The OpenAI-compatible endpoint. The admin port is not behind it."""
    port = {"name": "http", "port": 80, "targetPort": SERVING_PORT, "protocol": "TCP"}
    spec = {"selector": selector(owner.name), "ports": [port]}
    return child_document(owner, KUBERNETES_SERVICE, owner.name, spec=spec)


def disruption_budget(owner: ServiceIdentity, unready_canaries: int = 0, *, in_groups: bool = False) -> Object:
    """A budget that lets drains evict one pod at a time, and pods that are not ready always.

    unready_canaries: canary pods that start or crash for hours. They must not block drains of all other nodes.
    in_groups: the pods of groups count, too. A group goes with any of its pods, and the next one is evicted once all of
    its pods are ready again.
    """
    spec = {
        "maxUnavailable": 1 + unready_canaries,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": _pods_of_groups(owner) if in_groups else {"matchLabels": selector(owner.name)},
    }
    return child_document(owner, DISRUPTION_BUDGET, owner.name, spec=spec)


def network_policy(owner: ServiceIdentity, admin_port_peers: tuple[Object, ...], *, in_groups: bool = False) -> Object:
    """A policy that opens the admin port to `admin_port_peers` and the serving port to all.

    in_groups: workers reach leaders on all ports, for collectives choose theirs freely. The rule stands here, so that
    no group is cut apart where a quota refuses `groups_policy`.
    """
    ingress: list[Object] = [
        {"ports": [_port(SERVING_PORT)]},
        {"from": list(admin_port_peers), "ports": [_port(ADMIN_PORT)]},
        *([_from_groups(owner)] if in_groups else []),
    ]
    spec = {"podSelector": {"matchLabels": selector(owner.name)}, "policyTypes": ["Ingress"], "ingress": ingress}
    name = network_policy_name(owner.name)
    return child_document(owner, NETWORK_POLICY, name, spec=spec)


def groups_policy(owner: ServiceIdentity) -> Object:
    """A policy that opens workers to the pods of groups, on all ports. Nothing else reaches a worker."""
    workers = {"matchLabels": {SERVICE_LABEL: owner.name, COMPONENT_LABEL: WORKER}}
    spec = {"podSelector": workers, "policyTypes": ["Ingress"], "ingress": [_from_groups(owner)]}
    return child_document(owner, NETWORK_POLICY, groups_name(owner.name), spec=spec)


def _from_groups(owner: ServiceIdentity) -> Object:
    """An ingress rule for leaders and workers."""
    return {"from": [{"podSelector": _pods_of_groups(owner)}]}


def _pods_of_groups(owner: ServiceIdentity) -> Object:
    """A LabelSelector of leaders and workers."""
    return {
        "matchLabels": {SERVICE_LABEL: owner.name},
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": [SERVING, WORKER]}],
    }


def network_policy_name(service: str) -> str:
    """Name of the policy. It differs from the service's name, which many tenants use for a policy of their own."""
    return f"{service}-admin-port"


def _port(number: int) -> Object:
    return {"protocol": "TCP", "port": number}
