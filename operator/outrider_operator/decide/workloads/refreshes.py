"""Pods that should read a changed hot config now.

The kubelet looks at a pod's ConfigMaps once a minute, and whenever the pod changes: `mode: Off` in an incident cannot
wait for the minute, so an annotation of the pod is touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from outrider_crds.base import digest
from outrider_crds.runtime_config import CONFIG_KEY
from outrider_crds.state import RuntimeState

from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pods import Pods
from outrider_operator.inbound.reading import annotation, name_of, text, uid_of
from outrider_operator.model import CONFIG_MAP, Object
from outrider_operator.plan import Annotate

HOT_ANNOTATION = "outrider.dev/hot"
"""A pod's annotation: digest of the hot config that it is to read, and when that began (Unix seconds) or "again"."""
AGAIN_S = 3.0
"""A pod that reports the old config for this long is touched once more: its kubelet may have heard of the touch before
it heard of the ConfigMap."""


@dataclass(frozen=True)
class Refreshes:
    annotate: tuple[Annotate, ...] = ()
    requeue_after_s: float | None = None


def plan_refreshes(children: Children, hot_map: Object, pods: Pods, states: Mapping[str, RuntimeState]) -> Refreshes:
    """Touches of the ready pods that report another config than the stored one. hot_map: as it should be stored."""
    document = stamp(hot_map)
    if needs_apply(children.own(CONFIG_MAP, name_of(hot_map)), document):
        return Refreshes()
    hot_hash = digest(json.loads(text(hot_map, "data", CONFIG_KEY)))
    late = [pod for pod in pods.ready if _is_late(states.get(name_of(pod)), hot_hash)]
    marks = [(pod, _next_mark(pod, hot_hash, pods.now)) for pod in late]
    touches = tuple(Annotate(name_of(pod), uid_of(pod), {HOT_ANNOTATION: mark}) for pod, mark in marks if mark)
    is_unsure = any(annotation(pod, HOT_ANNOTATION) != _again(hot_hash) for pod in late)
    return Refreshes(touches, AGAIN_S if is_unsure else None)


def _is_late(state: RuntimeState | None, hot_hash: str) -> bool:
    """A pod that refuses the config has read it."""
    return state is not None and state.config_hash != hot_hash and not state.config_error


def _next_mark(pod: Object, hot_hash: str, at: float) -> str:
    """The annotation's next value; empty where the pod is not to be touched now."""
    mark = annotation(pod, HOT_ANNOTATION)
    known, _, moment = mark.partition("/")
    if known != hot_hash:
        return f"{hot_hash}/{at:.0f}"
    if mark == _again(hot_hash) or (moment.isdecimal() and at < int(moment[:_DIGITS]) + AGAIN_S):
        return ""
    return _again(hot_hash)


_DIGITS = 12
"""Longest moment that is read from an annotation that anyone may write."""


def _again(hot_hash: str) -> str:
    return f"{hot_hash}/again"
