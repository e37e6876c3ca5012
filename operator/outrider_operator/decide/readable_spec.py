"""Read the usable parts of a spec that this release does not understand: scale, kill switch and SLO classes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from outrider_crds.rules import violations
from outrider_crds.runtime_config import CONFIG_KEY, HotConfig
from outrider_crds.spec import SpeculativeServiceSpec
from pydantic import ValidationError

from outrider_operator.cluster_model import CONFIG_MAP, PODLESS_FIELDS, Object, hot_map_name
from outrider_operator.decide.ownership import Children
from outrider_operator.decide.revisions import Revision
from outrider_operator.validation.reading import items, text

_NEEDED = ("replicas", "paused", "speculation", "sloClasses", "defaultSLOClass")
"""Fields that must be readable, or in force already: a default in their place would change what pods do."""


def readable_spec(spec: Object, running: Revision, hot: HotConfig | None) -> SpeculativeServiceSpec | None:
    """Combine the fields of `spec` that make no revision with the pool, hardware and engine of `running`.

    A value that cannot be read stays as it is in force. None if one of these fields has none, or if the trimmed copy of
    a large spec lacks it. hot: the config that the pods of `running` mount.
    """
    if "replicas" not in spec:
        return None
    boot, in_force = running.boot.wire(), _in_force(hot)
    fields = {name: boot[name] for name in ("target", "accelerator", "engine")}
    fields["draftPool"] = _pool(boot.get("draftPool", []), spec, hot)
    for name in (name for name in PODLESS_FIELDS if name in spec):
        if _fits({**fields, name: spec[name]}, name):
            fields[name] = spec[name]
        elif name in in_force:
            fields[name] = _readable_parts(fields, name, spec[name], in_force[name])
        elif name in _NEEDED:
            return None
    return _parsed(fields)


def with_unknown_drafters(hot: HotConfig, spec: Object, running: Revision, mounted: HotConfig | None) -> HotConfig:
    """`hot`, plus pauses of drafters that pods of `running` may host and that this release does not know."""
    known = {drafter.name for drafter in running.boot.draft_pool}
    written = {text(drafter, "name"): drafter for drafter in items(spec, "draftPool")}
    paused = (mounted.paused_drafters or []) if mounted is not None else []
    unknown = [name for name in dict.fromkeys([*written, *paused]) if name not in known]
    both = [*(hot.paused_drafters or []), *(name for name in unknown if _is_paused(name, written, paused))]
    return hot.model_copy(update={"paused_drafters": both or None})


def _in_force(hot: HotConfig | None) -> dict[str, Any]:
    """Fields of a spec, as pods have them."""
    if hot is None:
        return {}
    wire = hot.wire()
    speculation = {name: wire[name] for name in ("mode", "draftPrefill", "maxDraftTokens") if name in wire}
    classes = {"sloClasses": wire.get("sloClasses", []), "defaultSLOClass": wire.get("defaultSLOClass")}
    return {"speculation": speculation, **classes}


def _readable_parts(fields: dict[str, Any], name: str, value: Any, in_force: Any) -> Any:
    """What is in force, with the parts of `value` that can be read: `mode: "Off"` counts next to an unknown field."""
    for key, part in value.items() if isinstance(value, dict) and isinstance(in_force, dict) else ():
        both = {**in_force, key: part}
        in_force = both if _fits({**fields, name: both}, name) else in_force
    return in_force


def _fits(fields: dict[str, Any], name: str) -> bool:
    parsed = _parsed(fields)
    return parsed is not None and all(_field(sentence) != name for sentence in violations(parsed, "spec"))


def stored_hot(children: Children) -> HotConfig | None:
    """The hot config that pods mount; None if it is missing or cannot be read."""
    try:
        return HotConfig.read(text(children.own(CONFIG_MAP, hot_map_name(children.owner.name)), "data", CONFIG_KEY))
    except ValidationError:
        return None


def _pool(booted: list[Object], spec: Object, hot: HotConfig | None) -> list[Object]:
    """The drafters that run. Order and pauses come from `spec`, or from `hot` for drafters that `spec` lacks."""
    written = {text(drafter, "name"): drafter for drafter in items(spec, "draftPool")}
    paused = set(hot.paused_drafters or ()) if hot is not None else set()
    carried = [name for name in (hot.drafter_order or () if hot is not None else ()) if name not in written]
    order = {name: place for place, name in enumerate([*written, *carried])}
    pool = [{**drafter, "paused": _is_paused(drafter["name"], written, paused)} for drafter in booted]
    return sorted(pool, key=lambda drafter: order.get(drafter["name"], len(order)))


def _is_paused(name: str, written: Mapping[str, Object], paused: Container[str]) -> bool:
    drafter = written.get(name)
    said = (drafter.get("paused") or False) if drafter is not None else None
    return said if isinstance(said, bool) else name in paused


def _parsed(fields: dict[str, Any]) -> SpeculativeServiceSpec | None:
    try:
        return SpeculativeServiceSpec.model_validate(fields, extra="ignore")
    except ValidationError:
        return None


def _field(sentence: str) -> str:
    """First field of a violation: "speculation" in "spec.speculation.mode: ..."."""
    return sentence.partition(":")[0].removeprefix("spec.").partition(".")[0].partition("[")[0]
