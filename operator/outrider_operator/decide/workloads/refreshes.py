"""Make pods read a changed hot config at once.

The kubelet syncs a pod's ConfigMaps once a minute, and whenever the pod changes. In an incident `mode: Off` cannot wait
a minute, so an annotation of the pod is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from outrider_crds.base import digest
from outrider_crds.runtime_config import CONFIG_KEY
from outrider_crds.runtime_state import RuntimeState

from outrider_operator.cluster_model import CONFIG_MAP, Object
from outrider_operator.decide.drift import needs_apply, stamp
from outrider_operator.decide.outcome import ConcernOutcome
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.pods.pod_states import Pods
from outrider_operator.plan import Annotate
from outrider_operator.validation.reading import annotation, name_of, text, uid_of

HOT_ANNOTATION = "outrider.dev/hot"
"""Annotation of a pod: digest of the hot config that it should read, and the time of the touch in Unix seconds, or
"again"."""
AGAIN_S = 3.0
"""Seconds after which a pod that still reports the old config is touched a second time: its kubelet may have seen the
touch before the ConfigMap."""


def plan_refreshes(
    children: Children, hot_map: Object, pods: Pods, states: Mapping[str, RuntimeState]
) -> ConcernOutcome:
    """Touch ready pods that do not report the stored config. hot_map: the ConfigMap as it should be stored."""
    document = stamp(hot_map)
    if needs_apply(children.own(CONFIG_MAP, name_of(hot_map)), document):
        return ConcernOutcome()
    hot_hash = digest(json.loads(text(hot_map, "data", CONFIG_KEY)))
    late = [pod for pod in pods.ready if _is_late(states.get(name_of(pod)), hot_hash)]
    marks = [(pod, _next_mark(pod, hot_hash, pods.at)) for pod in late]
    touches = tuple(Annotate(name_of(pod), uid_of(pod), {HOT_ANNOTATION: mark}) for pod, mark in marks if mark)
    is_unsure = any(annotation(pod, HOT_ANNOTATION) != _again(hot_hash) for pod in late)
    return ConcernOutcome(annotate=touches, wake_after_s=AGAIN_S if is_unsure else None)


def _is_late(state: RuntimeState | None, hot_hash: str) -> bool:
    """Does the pod still report an old config? One that reports a config error has read the new one."""
    return state is not None and state.config_hash != hot_hash and not state.config_error


def _next_mark(pod: Object, hot_hash: str, at: float) -> str:
    """The annotation's next value; empty if the pod is not to be touched now."""
    mark = annotation(pod, HOT_ANNOTATION)
    known, _, moment = mark.partition("/")
    if known != hot_hash:
        return f"{hot_hash}/{at:.0f}"
    if mark == _again(hot_hash) or (moment.isdecimal() and at < int(moment[:_DIGITS]) + AGAIN_S):
        return ""
    return _again(hot_hash)


_DIGITS = 12
"""Digits of a time that are read from the annotation, which anyone may write."""


def _again(hot_hash: str) -> str:
    return f"{hot_hash}/again"
