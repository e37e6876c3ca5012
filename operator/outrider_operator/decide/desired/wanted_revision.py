"""The revision that serves a spec: which changes create a new one, and how this release renders it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import Any

from outrider_crds.base import digest
from outrider_crds.runtime_config import boot_config
from outrider_crds.spec import SpeculativeServiceSpec

from outrider_operator import cluster_model
from outrider_operator.cluster_model import Object, OperatorSettings, ServiceIdentity
from outrider_operator.decide.desired import revisions
from outrider_operator.decide.drift import contains
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pod_spec.template import pod_template, pod_times
from outrider_operator.validation.reading import annotation, items, mapping

_TOKENS = re.compile(r"[0-9]{1,4}")
"""Number in an annotation, which anyone may write: Python refuses numbers of more than 4,300 digits."""
_INPUTS = {"target", "draft_pool", "accelerator", "engine", "model_cache", "ca_bundle", "pod_template"}
_HOT = {"draft_pool": {"__all__": {"paused"}}}


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
    stored: Iterable[revisions.Revision],
    settings: OperatorSettings,
    spec: SpeculativeServiceSpec,
    image: str,
    proven: Container[str],
) -> revisions.Revision:
    """The revision that serves `spec`: one of `stored` that was built for enough draft tokens, else a new one.

    proven: names of revisions that have had a ready pod. A raised deadline does not restart their pods. An unproven
    revision is replaced by one with the new deadline: its pods may need the time to get ready.
    """
    inputs = inputs_hash(spec, image)
    current = revisions.current_revision_name(children)
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
        return _made(children.owner, settings, spec, image, inputs, most, revisions.revision_name(inputs, most, needed))
    written = inputs_hash(spec, image, [drafter.name for drafter in spec.draft_pool])
    lost = _lost(children, settings, spec, image, inputs) or _lost(children, settings, spec, image, written)
    most = max(spec.speculation.max_draft_tokens, _canary_tokens(children, inputs))
    return lost or _made(children.owner, settings, spec, image, inputs, most, revisions.revision_name(inputs, most))


def _canary_tokens(children: Children, inputs: str) -> int:
    """maxDraftTokens at the start of a draft canary with the same `inputs`; 0 without one."""
    most = annotation(children.canary or {}, revisions.BOOT_TOKENS_ANNOTATION)
    is_same = annotation(children.canary or {}, revisions.INPUTS_LABEL) == inputs
    return int(most) if is_same and _TOKENS.fullmatch(most) else 0


def _is_for(revision: revisions.Revision, spec: SpeculativeServiceSpec, image: str) -> bool:
    """Was `revision` created from `spec`, in any order of its pool? Older releases hashed the pool as written."""
    order = [drafter.name for drafter in revision.boot.draft_pool]
    return revision.inputs in (inputs_hash(spec, image), inputs_hash(spec, image, order))


def _lost(
    children: Children, settings: OperatorSettings, spec: SpeculativeServiceSpec, image: str, inputs: str
) -> revisions.Revision | None:
    """The Deployment's revision if only its ConfigMap is lost. It is recreated without restarting pods."""
    deployment, name = children.workload or {}, revisions.current_revision_name(children)
    most = annotation(deployment, revisions.BOOT_TOKENS_ANNOTATION)
    if not name or annotation(deployment, revisions.INPUTS_LABEL) != inputs or not _TOKENS.fullmatch(most):
        return None
    live = mapping(deployment, "spec", "template")
    if int(most) < spec.speculation.max_draft_tokens or name not in revisions.possible_names(inputs, int(most), live):
        return None
    made = _made(children.owner, settings, spec, image, inputs, int(most), name)
    if contains(live, made.template):
        return made
    # Another release rendered it differently: the template of the running pods counts.
    metadata = {key: mapping(live, "metadata", key) for key in ("labels", "annotations")}
    return revisions.revision_of_contents(
        name, inputs, made.boot, {"metadata": metadata, "spec": mapping(live, "spec")}
    )


def _made(
    owner: ServiceIdentity,
    settings: OperatorSettings,
    spec: SpeculativeServiceSpec,
    image: str,
    inputs: str,
    most: int,
    name: str,
) -> revisions.Revision:
    """The revision for `inputs` as this release renders it, for up to `most` draft tokens."""
    boot = boot_config(
        spec, service=owner.name, namespace=owner.namespace, revision=name, image=image, max_draft_tokens=most
    )
    template = pod_template(spec, settings, owner.name, name, image, boot.profile_keys)
    return revisions.revision_of_contents(name, inputs, boot, template)


def canary_revision(
    owner: ServiceIdentity,
    settings: OperatorSettings,
    spec: SpeculativeServiceSpec,
    image: str,
    candidate: revisions.Revision,
) -> revisions.Revision:
    """The revision of a canary's pods. spec: has both pools, and the products of the canary's pods."""
    name = revisions.canary_revision_name(candidate.name, len(spec.accelerator.products))
    boot = boot_config(
        spec,
        service=owner.name,
        namespace=owner.namespace,
        revision=name,
        image=image,
        max_draft_tokens=candidate.boot.max_draft_tokens,
    )
    hot = cluster_model.canary_hot_map_name(owner.name)
    template = pod_template(spec, settings, owner.name, name, image, boot.profile_keys, hot)
    return revisions.revision_of_contents(name, candidate.inputs, boot, _on_canary_track(template, spec))


def _on_canary_track(template: Object, spec: SpeculativeServiceSpec) -> Object:
    """`template` with the label of canary pods. With several products, each gets the same number of pods."""
    metadata, pod = template["metadata"], template["spec"]
    metadata = {**metadata, "labels": {**metadata["labels"], cluster_model.TRACK_LABEL: cluster_model.CANARY_TRACK}}
    if len(spec.accelerator.products) < 2:
        return {"metadata": metadata, "spec": pod}
    spread = {
        "maxSkew": 1,
        "topologyKey": spec.accelerator.product_label,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {
            "matchLabels": {
                cluster_model.SERVICE_LABEL: metadata["labels"][cluster_model.SERVICE_LABEL],
                cluster_model.TRACK_LABEL: cluster_model.CANARY_TRACK,
            }
        },
    }
    # Kubernetes takes one constraint of a key and an effect.
    others = [
        constraint
        for constraint in items(pod, "topologySpreadConstraints")
        if any(constraint.get(name) != spread[name] for name in ("topologyKey", "whenUnsatisfiable"))
    ]
    return {"metadata": metadata, "spec": {**pod, "topologySpreadConstraints": [*others, spread]}}
