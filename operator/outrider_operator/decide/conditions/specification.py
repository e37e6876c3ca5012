"""Condition SpecValid, and whether the spec may be applied at all: what only the cluster can hold against it."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from pathlib import PurePosixPath

from outrider_crds.spec import MetricsSource, SpeculativeServiceSpec
from outrider_crds.status import Reason

from outrider_operator.decide.conditions.verdict import Verdict, false, true
from outrider_operator.decide.ownership import Children, controller_name
from outrider_operator.decide.pod_spec.patch import objections, writable_host_mount
from outrider_operator.inbound.reading import cut
from outrider_operator.model import Rejection, Settings


def unreadable(why: str) -> Verdict:
    """The CRD of another release let a spec through that this one cannot read."""
    return false(Reason.INVALID_SPEC, cut(f"The spec does not fit this release of Outrider: {why}.", 2048))


def objection(
    spec: SpeculativeServiceSpec, settings: Settings, children: Children, names: Iterable[tuple[str, str]]
) -> Verdict | None:
    """Why the spec must not be applied: the children stay as they are and the pods serve on. None when it may be.

    `names` holds (kind, name) of the objects that it asks for.
    """
    return (
        _pod_template(spec)
        or _tokens(spec)
        or _host_paths(spec, settings)
        or _prometheus(spec, settings)
        or _conflict(children, names)
    )


def accepted(rewritten: Iterable[Rejection]) -> Verdict:
    """With the first of what admission `rewritten`: nothing stands still for that, and nobody would look for it."""
    first = next(iter(rewritten), None)
    what = (
        f" {first.kind} {first.name} is changed by the cluster after Outrider sends it: {first.message}."
        if first
        else ""
    )
    why = " An admission policy of the cluster, or another writer, changes it; it is sent again now and then."
    return true(Reason.ACCEPTED, cut(f"The spec is accepted.{what}{why if first else ''}", 2048))


def refusal(rejections: Iterable[Rejection]) -> Verdict | None:
    """The verdict on a spec of which the API server does not take a part: the first of `rejections`, if any."""
    first = next(iter(rejections), None)
    if first is None:
        return None
    said = f"The API server refuses {first.kind} {first.name}: {first.message.strip().rstrip('.')}. Correct the spec"
    return false(Reason.CHILD_REJECTED, cut(f"{said}, or what forbids it; it is tried again.", 2048))


def _pod_template(spec: SpeculativeServiceSpec) -> Verdict | None:
    """What the patch must leave alone. The CRD keeps fields that it does not know, so admission cannot say it."""
    sentence = next(objections(spec.pod_template), "")
    if not sentence and (where := writable_host_mount(spec.pod_template)):
        sentence = f"{where} could write to the node: add readOnly: true"
    return false(Reason.INVALID_SPEC, cut(f"{sentence}.", 2048)) if sentence else None


def _host_paths(spec: SpeculativeServiceSpec, settings: Settings) -> Verdict | None:
    """Model sources and podTemplate.volumes alike: both reach the node's files."""
    allowed = settings.allowed_host_paths
    forbidden = [(where, path) for where, path in _host_paths_of(spec) if not _is_inside(path, allowed)]
    if not forbidden:
        return None
    where, path = forbidden[0]
    what = f"folders other than {', '.join(allowed)}" if allowed else "any folder"
    return false(
        Reason.HOST_PATH_FORBIDDEN,
        f"spec.{where} names {path} of the node, and this installation does not allow {what}. Use a "
        "PersistentVolumeClaim, or install the chart with the folder among allowedHostPaths.",
    )


def _host_paths_of(spec: SpeculativeServiceSpec) -> list[tuple[str, str]]:
    """(field, path on the node), each."""
    models = {"target": spec.target, **{f"draftPool[{d.name}]": d.neural.model for d in spec.draft_pool if d.neural}}
    sources = [(f"{name}.source", model.source.host_path) for name, model in models.items()]
    volumes = [(f"podTemplate.volumes[{v.name}]", v.host_path) for v in spec.pod_template.volumes]
    return [(where, source.path) for where, source in (*sources, *volumes) if source is not None]


def _is_inside(path: str, folders: tuple[str, ...]) -> bool:
    """By whole names: /models holds /models/a, not /models-of-others. What links lead to is the node's to guard."""
    normal = PurePosixPath(posixpath.normpath(path))
    return ".." not in path.split("/") and any(normal.is_relative_to(folder) for folder in folders)


def _prometheus(spec: SpeculativeServiceSpec, settings: Settings) -> Verdict | None:
    if spec.metrics.source is not MetricsSource.PROMETHEUS or settings.prometheus_configured:
        return None
    return false(
        Reason.PROMETHEUS_NOT_CONFIGURED,
        "spec.metrics.source is Prometheus, and this installation names none. Use metrics.source: Pods, or install "
        "the chart with prometheus.url.",
    )


def _tokens(spec: SpeculativeServiceSpec) -> Verdict | None:
    """A pod has one token, and a draft whose download is refused would be left out. Too costly a rule for the CRD."""
    names = sorted({f"{ref.name}/{ref.key}" for ref in spec.token_refs})
    if len(names) <= 1:
        return None
    return false(
        Reason.INVALID_SPEC,
        f"Target and drafts name different tokenSecretRef ({', '.join(names)}), and a pod has one token: name one "
        "Secret whose token may read all of them, or take a model from a claim.",
    )


def _conflict(children: Children, names: Iterable[tuple[str, str]]) -> Verdict | None:
    found = children.foreign(names)
    if not found:
        return None
    kind, name = found[0]
    owner = controller_name(children.documents[found[0]])
    whose = f"belongs to {owner}" if owner else "was not made by Outrider"
    return false(
        Reason.NAME_CONFLICT,
        f"{kind} {name} {whose} and is left alone. Delete it, or give the SpeculativeService another name.",
    )
