"""Revisions, and the immutable ConfigMap that stores each.

A revision's ConfigMap contains the boot config and the pod template from the time when the revision was created. They
never change, so neither an upgrade of the operator nor a change of `rollout` restarts pods of an unchanged spec. Raised
deadlines create a new revision only if no pod was ready before.

The right to write ConfigMaps must not become the right to create pods. A stored revision therefore counts only if the
Deployment or a ReplicaSet has its digest, since the right to write these allows to create pods anyway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from outrider_crds.base import digest
from outrider_crds.profile_keys import ProfileKeys
from outrider_crds.runtime_config import CONFIG_KEY, BootConfig
from pydantic import ValidationError
from pydantic_core import from_json

from outrider_operator.cluster_model import (
    CONFIG_MAP,
    REVISION_LABEL,
    Object,
    ServiceIdentity,
    canary_hot_map_name,
    config_file_map_name,
    hot_map_name,
    revision_map_name,
)
from outrider_operator.decide.ownership import Children, child_document
from outrider_operator.decide.pod_spec.template import PodTimes, times_of
from outrider_operator.validation.reading import (
    annotation,
    controller_uid,
    created_s,
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


def canary_revision_name(candidate: str, products: int = 1) -> str:
    """Name of the revision whose pods host the draft pools of `candidate` and of the running revision.

    products: number of products that the pods run on.
    """
    return f"{candidate}c{products if products > 1 else ''}"


def stored_canary(children: Children, replica_sets: Iterable[Object], name: str) -> Revision | None:
    """The stored revision `name` of a canary's pods; None unless pods were created from its ConfigMap."""
    document = children.own(CONFIG_MAP, revision_map_name(children.owner.name, name))
    vouched = {(label(owner, REVISION_LABEL), annotation(owner, CONTENTS_ANNOTATION)) for owner in replica_sets}
    vouched.add((revision_in(children.canary), annotation(children.canary or {}, CONTENTS_ANNOTATION)))
    if document is None or _stands_for(document) not in vouched or label(document, REVISION_LABEL) != name:
        return None
    return _parsed(document)


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
    names = (hot_map_name(children.owner.name), config_file_map_name(children.owner.name))
    maps = [
        *(children.own(CONFIG_MAP, name) for name in names),
        *_vouched_maps(children, _vouched(children, replica_sets)),
    ]
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
    names = {REVISION_LABEL: revision.name, INPUTS_LABEL: revision.inputs}
    name, data = revision_map_name(owner.name, revision.name), _contents(revision.boot, revision.template)
    return child_document(owner, CONFIG_MAP, name, more_labels=names, immutable=True, data=data)


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


def revision_name(inputs: str, max_draft_tokens: int, times: PodTimes | None = None) -> str:
    """Name of a revision. times: given for a revision that differs from another one only in its deadlines."""
    fields = {"inputs": inputs, "maxDraftTokens": max_draft_tokens}
    return digest({**fields, "startupProbes": times.startup_probes, "graceSeconds": times.grace_s} if times else fields)


def possible_names(inputs: str, max_draft_tokens: int, template: Object) -> tuple[str, str]:
    """Names that a revision with this pod template may have."""
    return revision_name(inputs, max_draft_tokens), revision_name(inputs, max_draft_tokens, times_of(template))


def revision_of_contents(name: str, inputs: str, boot: BootConfig, template: Object) -> Revision:
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
    names = possible_names(revision.inputs, revision.boot.max_draft_tokens, revision.template)
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
