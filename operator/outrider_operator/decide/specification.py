"""Rules of a spec that the CRD cannot check: may it be applied in this cluster?"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from pathlib import PurePosixPath

from outrider_crds.conditions import ConditionReason
from outrider_crds.spec import MetricsSource, SpeculativeServiceSpec

from outrider_operator import cluster_model
from outrider_operator.cluster_model import KindAccess, OperatorSettings
from outrider_operator.decide.outcome import Verdict, false
from outrider_operator.decide.ownership import Children, controller_name
from outrider_operator.decide.pod_spec.patch import patch_problems, writable_host_mount
from outrider_operator.validation.reading import cut


def unreadable_spec(why: str) -> Verdict:
    """Verdict on a spec that the CRD of another release accepted and this release cannot read."""
    return false(ConditionReason.INVALID_SPEC, cut(f"The spec does not fit this release of Outrider: {why}.", 2048))


def spec_problem(
    spec: SpeculativeServiceSpec,
    settings: OperatorSettings,
    children: Children,
    names: Iterable[tuple[str, str]],
) -> Verdict | None:
    """Why the spec must not be applied; None if it may be. While it must not, the children stay and the pods serve on.

    names: (kind, name) of the objects that the spec needs.
    """
    return (
        _pod_template(spec)
        or _tokens(spec)
        or _host_paths(spec, settings)
        or _prometheus(spec, settings)
        or _conflict(children, names)
    )


def _pod_template(spec: SpeculativeServiceSpec) -> Verdict | None:
    """Check the fields that podTemplate must not set. The CRD keeps unknown fields, so admission cannot check them."""
    sentence = next(patch_problems(spec.pod_template), "")
    if not sentence and (where := writable_host_mount(spec.pod_template)):
        sentence = f"{where} could write to the node: add readOnly: true"
    return false(ConditionReason.INVALID_SPEC, cut(f"{sentence}.", 2048)) if sentence else None


def _host_paths(spec: SpeculativeServiceSpec, settings: OperatorSettings) -> Verdict | None:
    """Check host paths of model sources and podTemplate.volumes: both reach the node's files."""
    allowed = settings.allowed_host_paths
    forbidden = [(where, path) for where, path in _host_paths_of(spec) if not _is_inside(path, allowed)]
    if not forbidden:
        return None
    where, path = forbidden[0]
    what = f"folders other than {', '.join(allowed)}" if allowed else "any folder"
    return false(
        ConditionReason.HOST_PATH_FORBIDDEN,
        f"spec.{where} names {path} of the node, and this installation does not allow {what}. Use a "
        "PersistentVolumeClaim, or install the chart with the folder among allowedHostPaths.",
    )


def _host_paths_of(spec: SpeculativeServiceSpec) -> list[tuple[str, str]]:
    """(field, path on the node) of every host path."""
    sources = [(f"{name}.source", model.source.host_path) for name, model in spec.models.items()]
    lora = spec.engine.lora
    if lora is not None and lora.volume is not None:
        sources.append(("engine.lora.volume", lora.volume.host_path))
    volumes = [(f"podTemplate.volumes[{v.name}]", v.host_path) for v in spec.pod_template.volumes]
    return [(where, source.path) for where, source in (*sources, *volumes) if source is not None]


def _is_inside(path: str, folders: tuple[str, ...]) -> bool:
    """Is `path` below one of `folders`? /models contains /models/a, not /models-of-others. Links are not followed."""
    normal = PurePosixPath(posixpath.normpath(path))
    return ".." not in path.split("/") and any(normal.is_relative_to(folder) for folder in folders)


def _prometheus(spec: SpeculativeServiceSpec, settings: OperatorSettings) -> Verdict | None:
    if spec.metrics.source is not MetricsSource.PROMETHEUS or settings.prometheus_configured:
        return None
    return false(
        ConditionReason.PROMETHEUS_NOT_CONFIGURED,
        "spec.metrics.source is Prometheus, and this installation names none. Use metrics.source: Pods, or install "
        "the chart with prometheus.url.",
    )


def _tokens(spec: SpeculativeServiceSpec) -> Verdict | None:
    """Check that all models use one token: a pod has only one. The rule is too costly for the CRD."""
    names = sorted({f"{ref.name}/{ref.key}" for ref in spec.token_refs})
    if len(names) <= 1:
        return None
    return false(
        ConditionReason.INVALID_SPEC,
        f"Target and drafts name different tokenSecretRef ({', '.join(names)}), and a pod has one token: name one "
        "Secret whose token may read all of them, or take a model from a claim.",
    )


def _conflict(children: Children, names: Iterable[tuple[str, str]]) -> Verdict | None:
    foreign = children.foreign(names)
    return name_conflict(foreign[0], children.documents[foreign[0]]) if foreign else None


def name_conflict(key: tuple[str, str], document: cluster_model.Object) -> Verdict:
    """Verdict on a spec that needs the (kind, name) `key`, which an object of another owner has."""
    kind, name = key
    owner = controller_name(document)
    whose = f"belongs to {owner}" if owner else "was not made by Outrider"
    return false(
        ConditionReason.NAME_CONFLICT,
        f"{kind} {name} {whose} and is left alone. Delete it, or give the SpeculativeService another name.",
    )


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
    key = cluster_model.KUBERNETES_SERVICE, cluster_model.groups_name(children.owner.name)
    document = children.documents.get(key)
    if spec.engine.nodes == 1 or document is None:
        return None
    is_of_groups = controller_name(document) == f"{cluster_model.LEADER_WORKER_SET} {key[1]}"
    return None if is_of_groups else name_conflict(key, document)
