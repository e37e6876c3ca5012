"""Revisions: which changes create a new one, and the immutable ConfigMap that stores each.

A revision's ConfigMap contains the boot config and the pod template from the time when the revision was created. They
never change, so neither an upgrade of the operator nor a change of `rollout` restarts pods of an unchanged spec. Raised
deadlines create a new revision only if no pod was ready before.

The right to write ConfigMaps must not become the right to create pods. A stored revision therefore counts only if the
Deployment or a ReplicaSet has its digest, since the right to write these allows to create pods anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_crds.base import digest
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.runtime_config import CONFIG_KEY, BootConfig, boot_config
from outrider_crds.spec import SpeculativeServiceSpec
from pydantic import ValidationError
from pydantic_core import from_json

from outrider_operator.cluster_model import (
    CANARY_TRACK,
    CONFIG_MAP,
    REVISION_LABEL,
    SERVICE_LABEL,
    TRACK_LABEL,
    Object,
    OperatorSettings,
    ServiceIdentity,
    canary_hot_map_name,
    hot_map_name,
    revision_map_name,
)
from outrider_operator.decide.drift import contains
from outrider_operator.decide.ownership import Children, labels, owner_reference
from outrider_operator.decide.pod_spec.template import PodTimes, pod_template, pod_times, times_of
from outrider_operator.validation.reading import (
    annotation,
    controller_uid,
    created_s,
    items,
    label,
    mapping,
    name_of,
    text,
)

INPUTS_LABEL = "outrider.dev/inputs"
BOOT_TOKENS_ANNOTATION = "outrider.dev/boot-draft-tokens"
CONTENTS_ANNOTATION = "outrider.dev/contents"
"""Annotation of the Deployment and its ReplicaSets: digest of the revision's contents, too long to forge."""
READY_ANNOTATION = "outrider.dev/ready-revision"
"""Annotation of the Deployment: the newest revision that had a ready pod. The status has it as well, but a CRD of an
older release drops that field."""
_DIGEST_LENGTH = 64
TEMPLATE_KEY = "pod-template.json"
_MOST_STORED = 16
"""Revisions whose contents are read: the Deployment's, then the newest. A Deployment keeps ten old ReplicaSets."""
_NAME = re.compile(r"[0-9a-f]{1,63}")
_TOKENS = re.compile(r"[0-9]{1,4}")
"""Number in an annotation, which anyone may write: Python refuses numbers of more than 4,300 digits."""
_INPUTS = {"target", "draft_pool", "accelerator", "engine", "model_cache", "ca_bundle", "pod_template"}
_HOT = {"draft_pool": {"__all__": {"paused"}}}


@dataclass(frozen=True)
class Revision:
    name: str
    inputs: str
    """Hash of everything that makes a revision except maxDraftTokens, which is hot up to its value at boot."""
    boot: BootConfig
    template: Object
    fingerprint: str
    """Digest of boot config and template as they are stored."""

    @property
    def keys(self) -> list[ProfileKeys]:
        return self.boot.profile_keys

    @property
    def times(self) -> PodTimes:
        return times_of(self.template)


def inputs_hash(spec: SpeculativeServiceSpec, image: str, order: Sequence[str] = ()) -> str:
    """Hash of the fields that only new pods can adopt.

    Defaults are left out, so that a field that a later release adds restarts nothing. The pool's order is hot, so the
    pool is hashed in the fixed `order` (names), else sorted by name.
    """
    place = {name: index for index, name in enumerate(order)}
    pool = sorted(spec.draft_pool, key=lambda drafter: (place.get(drafter.name, len(place)), drafter.name))
    spec = spec.model_copy(update={"draft_pool": pool})
    fields = spec.model_dump(
        mode="json", by_alias=True, include=_INPUTS, exclude=_HOT, exclude_defaults=True, exclude_none=True
    )
    return digest({"fields": _without_empty_values(fields), "image": image})


def _without_empty_values(fields: Object) -> Object:
    """`fields` without empty values of podTemplate, as older releases hashed them.

    An empty text is removed only in `env`: in labels and node selectors it has a meaning.
    """
    template = mapping(fields, "podTemplate")
    env = [
        {name: item for name, item in variable.items() if (name, item) != ("value", "")}
        for variable in items(template, "env")
    ]
    kept = _without_empty_lists({**template, "env": env})
    others = {name: item for name, item in fields.items() if name != "podTemplate"}
    return {**others, "podTemplate": kept} if kept else others


def _without_empty_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_empty_lists(item) for name, item in value.items() if item != []}
    return [_without_empty_lists(item) for item in value] if isinstance(value, list) else value


def wanted_revision(
    children: Children,
    stored: Iterable[Revision],
    settings: OperatorSettings,
    spec: SpeculativeServiceSpec,
    image: str,
    proven: Container[str],
) -> Revision:
    """The revision that serves `spec`: one of `stored` that was built for enough draft tokens, else a new one.

    proven: names of revisions that have had a ready pod. A raised deadline does not restart their pods. An unproven
    revision is replaced by one with the new deadline: its pods may need the time to get ready.
    """
    inputs = inputs_hash(spec, image)
    current = current_revision_name(children)
    fitting = [
        revision
        for revision in stored
        if _is_for(revision, spec, image) and revision.boot.max_draft_tokens >= spec.speculation.max_draft_tokens
    ]
    needed = pod_times(spec.rollout)
    patient = [revision for revision in fitting if revision.name in proven or revision.times.cover(needed)]
    if patient:
        return min(patient, key=lambda r: (r.name != current, r.boot.max_draft_tokens, r.name))
    if fitting:
        most = min(revision.boot.max_draft_tokens for revision in fitting)
        return _made(children.owner, settings, spec, image, inputs, most, revision_name(inputs, most, needed))
    written = inputs_hash(spec, image, [drafter.name for drafter in spec.draft_pool])
    lost = _lost(children, settings, spec, image, inputs) or _lost(children, settings, spec, image, written)
    most = max(spec.speculation.max_draft_tokens, _canary_tokens(children, inputs))
    return lost or _made(children.owner, settings, spec, image, inputs, most, revision_name(inputs, most))


def _canary_tokens(children: Children, inputs: str) -> int:
    """maxDraftTokens at the start of a draft canary with the same `inputs`; 0 without one."""
    most = annotation(children.canary or {}, BOOT_TOKENS_ANNOTATION)
    is_same = annotation(children.canary or {}, INPUTS_LABEL) == inputs
    return int(most) if is_same and _TOKENS.fullmatch(most) else 0


def canary_revision_name(candidate: str, products: int = 1) -> str:
    """Name of the revision whose pods host the draft pools of `candidate` and of the running revision.

    products: number of products that the pods run on.
    """
    return f"{candidate}c{products if products > 1 else ''}"


def canary_revision(
    owner: ServiceIdentity,
    settings: OperatorSettings,
    spec: SpeculativeServiceSpec,
    image: str,
    candidate: Revision,
) -> Revision:
    """The revision of a canary's pods. spec: has both pools, and the products of the canary's pods."""
    name = canary_revision_name(candidate.name, len(spec.accelerator.products))
    boot = boot_config(
        spec,
        service=owner.name,
        namespace=owner.namespace,
        revision=name,
        image=image,
        max_draft_tokens=candidate.boot.max_draft_tokens,
    )
    hot = canary_hot_map_name(owner.name)
    template = pod_template(spec, settings, owner.name, name, image, boot.profile_keys, hot)
    return _revision(name, candidate.inputs, boot, _on_canary_track(template, spec))


def _on_canary_track(template: Object, spec: SpeculativeServiceSpec) -> Object:
    """`template` with the label of canary pods. With several products, each gets the same number of pods."""
    metadata, pod = template["metadata"], template["spec"]
    metadata = {**metadata, "labels": {**metadata["labels"], TRACK_LABEL: CANARY_TRACK}}
    if len(spec.accelerator.products) < 2:
        return {"metadata": metadata, "spec": pod}
    spread = {
        "maxSkew": 1,
        "topologyKey": spec.accelerator.product_label,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {SERVICE_LABEL: metadata["labels"][SERVICE_LABEL], TRACK_LABEL: CANARY_TRACK}},
    }
    # Kubernetes takes one constraint of a key and an effect.
    others = [
        constraint
        for constraint in items(pod, "topologySpreadConstraints")
        if any(constraint.get(name) != spread[name] for name in ("topologyKey", "whenUnsatisfiable"))
    ]
    return {"metadata": metadata, "spec": {**pod, "topologySpreadConstraints": [*others, spread]}}


def stored_canary(children: Children, replica_sets: Iterable[Object], name: str) -> Revision | None:
    """The stored revision `name` of a canary's pods; None unless pods were created from its ConfigMap."""
    document = children.own(CONFIG_MAP, revision_map_name(children.owner.name, name))
    vouched = {(label(owner, REVISION_LABEL), annotation(owner, CONTENTS_ANNOTATION)) for owner in replica_sets}
    vouched.add((revision_in(children.canary), annotation(children.canary or {}, CONTENTS_ANNOTATION)))
    if document is None or _stands_for(document) not in vouched or label(document, REVISION_LABEL) != name:
        return None
    return _parsed(document)


def _is_for(revision: Revision, spec: SpeculativeServiceSpec, image: str) -> bool:
    """Was `revision` created from `spec`, in any order of its pool? Older releases hashed the pool as written."""
    order = [drafter.name for drafter in revision.boot.draft_pool]
    return revision.inputs in (inputs_hash(spec, image), inputs_hash(spec, image, order))


def stored_revisions(children: Children, replica_sets: Iterable[Object]) -> tuple[Revision, ...]:
    """Revisions whose ConfigMaps exist, can be read, and are unchanged since pods were created from them.

    Other ConfigMaps are not parsed: they may be large, and every reconcile would take that time.
    """
    vouched = _vouched(children, replica_sets)
    genuine = (document for document in _vouched_maps(children, vouched) if _stands_for(document) in vouched)
    revisions = (_read(document) for document in genuine)
    return tuple(revision for revision in revisions if revision is not None)


def unread_maps(children: Children, replica_sets: Iterable[Object]) -> list[str]:
    """Names of ConfigMaps that every decision needs, but whose contents were not read yet."""
    hot = children.own(CONFIG_MAP, hot_map_name(children.owner.name))
    maps = [hot, *_vouched_maps(children, _vouched(children, replica_sets))]
    return [name_of(document) for document in maps if document is not None and "data" not in document]


def unread_canary_maps(children: Children, candidate: str) -> list[str]:
    """Names of a canary's ConfigMaps that exist, but whose contents were not read yet."""
    maps = [children.own(CONFIG_MAP, canary_hot_map_name(children.owner.name))]
    for document in children.config_maps:
        revision = label(document, REVISION_LABEL)
        is_of_candidate = revision.startswith(canary_revision_name(candidate))
        if revision and (is_of_candidate or revision == revision_in(children.canary)):
            maps.append(children.own(CONFIG_MAP, revision_map_name(children.owner.name, revision)))
    return [name_of(document) for document in maps if document is not None and "data" not in document]


def unread_map(children: Children, revision: Revision) -> list[str]:
    """Name of the ConfigMap of `revision` if it exists, but its contents were not read yet."""
    document = children.own(CONFIG_MAP, revision_map_name(children.owner.name, revision.name))
    return [name_of(document)] if document is not None and "data" not in document else []


def current_revision(children: Children, stored: Iterable[Revision]) -> Revision | None:
    """The revision in `stored` that the workload runs; None without one, or if its ConfigMap is gone."""
    current = current_revision_name(children)
    return next((revision for revision in stored if revision.name == current), None)


def current_revision_name(children: Children) -> str:
    return revision_in(children.workload)


def revision_in(deployment: Object | None) -> str:
    """Name of the revision in the Deployment's pod template; empty without a Deployment."""
    return text(deployment, "spec", "template", "metadata", "labels", REVISION_LABEL)


def ready_revision(children: Children, reported: str, ready: Container[str]) -> str:
    """The newest revision that had a ready pod. reported: value in the status. ready: revisions of ready pods."""
    current, noted = current_revision_name(children), annotation(children.workload or {}, READY_ANNOTATION)
    if current in ready:
        return current
    return noted if _NAME.fullmatch(noted) else reported


def revision_map(owner: ServiceIdentity, revision: Revision) -> Object:
    """The immutable ConfigMap that stores `revision`. Pods mount its boot config."""
    return {
        "apiVersion": "v1",
        "kind": CONFIG_MAP,
        "metadata": {
            "name": revision_map_name(owner.name, revision.name),
            "namespace": owner.namespace,
            "labels": {**labels(owner.name), REVISION_LABEL: revision.name, INPUTS_LABEL: revision.inputs},
            "ownerReferences": [owner_reference(owner, controller=True)],
        },
        "immutable": True,
        "data": _contents(revision.boot, revision.template),
    }


def unneeded_maps(children: Children, needed: set[str]) -> list[Object]:
    """ConfigMaps of revisions that are not in `needed` (names)."""
    maps = [document for document in children.config_maps if label(document, REVISION_LABEL)]
    return [
        document
        for document in maps
        if not (_is_map_of(children.owner, document) and label(document, REVISION_LABEL) in needed)
    ]


def orphaned_maps(children: Children, needed: set[str]) -> list[Object]:
    """ConfigMaps of revisions in `needed` (names) that a deleted service of this name left without an owner."""
    maps = [
        document
        for document in children.config_maps
        if _is_map_of(children.owner, document) and not controller_uid(document)
    ]
    return [document for document in maps if label(document, REVISION_LABEL) in needed]


def revision_annotations(revision: Revision) -> dict[str, str]:
    """Annotations of the Deployment from which the revision's ConfigMap can be recreated if it is lost."""
    return {
        INPUTS_LABEL: revision.inputs,
        BOOT_TOKENS_ANNOTATION: str(revision.boot.max_draft_tokens),
        CONTENTS_ANNOTATION: revision.fingerprint,
    }


def _lost(
    children: Children, settings: OperatorSettings, spec: SpeculativeServiceSpec, image: str, inputs: str
) -> Revision | None:
    """The Deployment's revision if only its ConfigMap is lost. It is recreated without restarting pods."""
    deployment, name = children.workload or {}, current_revision_name(children)
    most = annotation(deployment, BOOT_TOKENS_ANNOTATION)
    if not name or annotation(deployment, INPUTS_LABEL) != inputs or not _TOKENS.fullmatch(most):
        return None
    live = mapping(deployment, "spec", "template")
    if int(most) < spec.speculation.max_draft_tokens or name not in _names(inputs, int(most), live):
        return None
    made = _made(children.owner, settings, spec, image, inputs, int(most), name)
    if contains(live, made.template):
        return made
    # Another release rendered it differently: the template of the running pods counts.
    metadata = {key: mapping(live, "metadata", key) for key in ("labels", "annotations")}
    return _revision(name, inputs, made.boot, {"metadata": metadata, "spec": mapping(live, "spec")})


def revision_name(inputs: str, max_draft_tokens: int, times: PodTimes | None = None) -> str:
    """Name of a revision. times: given for a revision that differs from another one only in its deadlines."""
    fields = {"inputs": inputs, "maxDraftTokens": max_draft_tokens}
    return digest({**fields, "startupProbes": times.startup_probes, "graceSeconds": times.grace_s} if times else fields)


def _names(inputs: str, max_draft_tokens: int, template: Object) -> tuple[str, str]:
    """Names that a revision with this pod template may have."""
    return revision_name(inputs, max_draft_tokens), revision_name(inputs, max_draft_tokens, times_of(template))


def _made(
    owner: ServiceIdentity,
    settings: OperatorSettings,
    spec: SpeculativeServiceSpec,
    image: str,
    inputs: str,
    most: int,
    name: str,
) -> Revision:
    """The revision for `inputs` as this release renders it, for up to `most` draft tokens."""
    boot = boot_config(
        spec, service=owner.name, namespace=owner.namespace, revision=name, image=image, max_draft_tokens=most
    )
    template = pod_template(spec, settings, owner.name, name, image, boot.profile_keys)
    return _revision(name, inputs, boot, template)


def _revision(name: str, inputs: str, boot: BootConfig, template: Object) -> Revision:
    return Revision(name, inputs, boot, template, _fingerprint(_contents(boot, template)))


def _is_map_of(owner: ServiceIdentity, document: Object) -> bool:
    """Is `document` the ConfigMap that pods of its revision mount? Labels alone may be on any other ConfigMap."""
    name = label(document, REVISION_LABEL)
    return bool(name) and name_of(document) == revision_map_name(owner.name, name)


def _vouched(children: Children, replica_sets: Iterable[Object]) -> set[tuple[str, str]]:
    """(revision, digest of its contents) of the revisions that pods were created from."""
    pairs = {(label(document, REVISION_LABEL), annotation(document, CONTENTS_ANNOTATION)) for document in replica_sets}
    pairs |= {(revision_in(workload), annotation(workload, CONTENTS_ANNOTATION)) for workload in children.workloads}
    return {(name, fingerprint) for name, fingerprint in pairs if fingerprint}


def _stands_for(document: Object) -> tuple[str, str]:
    """(revision, digest of its contents) of a ConfigMap."""
    return label(document, REVISION_LABEL), _fingerprint(mapping(document, "data"))


def _contents(boot: BootConfig, template: Object) -> dict[str, str]:
    """Data of a revision's ConfigMap. Equal revisions have equal texts."""
    return {
        CONFIG_KEY: json.dumps(boot.wire(), indent=1, sort_keys=True),
        TEMPLATE_KEY: json.dumps(template, sort_keys=True),
    }


def _fingerprint(contents: Mapping[str, str]) -> str:
    return digest([text(contents, key) for key in (CONFIG_KEY, TEMPLATE_KEY)], _DIGEST_LENGTH)


def _vouched_maps(children: Children, vouched: set[tuple[str, str]]) -> list[Object]:
    """The ConfigMaps that may store the revisions in `vouched`. They are selected by metadata and limited in number:
    users may create and fill any number of others."""
    names, current = {name for name, _ in vouched}, current_revision_name(children)
    maps = [document for document in children.config_maps if label(document, REVISION_LABEL) in names]
    kept = [document for document in maps if _is_map_of(children.owner, document)]
    return sorted(kept, key=lambda document: _precedence(document, current), reverse=True)[:_MOST_STORED]


def _precedence(document: Object, current: str) -> tuple[bool, float, str]:
    return label(document, REVISION_LABEL) == current, created_s(document), name_of(document)


def _read(document: Object) -> Revision | None:
    revision = _parsed(document)
    if revision is None:
        return None
    names = _names(revision.inputs, revision.boot.max_draft_tokens, revision.template)
    return revision if revision.name in names else None  # labels can be changed where contents cannot


def _parsed(document: Object) -> Revision | None:
    name, inputs = label(document, REVISION_LABEL), label(document, INPUTS_LABEL)
    try:
        boot = BootConfig.read_known(text(document, "data", CONFIG_KEY))
        template = from_json(text(document, "data", TEMPLATE_KEY))
    except (ValidationError, ValueError):
        return None
    if not mapping(template, "spec"):
        return None
    return Revision(name, inputs, boot, template, _fingerprint(mapping(document, "data")))
