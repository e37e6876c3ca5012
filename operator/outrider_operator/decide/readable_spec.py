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

_NEEDED = {"replicas", "paused", "speculation", "sloClasses", "defaultSLOClass"}
"""Fields that must be readable: a default in their place would change what pods do."""


def readable_spec(spec: Object, running: Revision, hot: HotConfig | None) -> SpeculativeServiceSpec | None:
    """Combine the fields of `spec` that make no revision with the pool, hardware and engine of `running`.

    None if one of these fields cannot be read, or is missing in the trimmed copy of a large spec.
    hot: the config that the pods of `running` mount.
    """
    if "replicas" not in spec:
        return None
    boot = running.boot.wire()
    kept = {name: boot[name] for name in ("target", "accelerator", "engine")}
    kept["draftPool"] = _pool(boot.get("draftPool", []), spec, hot)
    small = {name: spec[name] for name in PODLESS_FIELDS if name in spec}
    parsed = _parsed({**kept, **small}) or _parsed({**kept, **{k: v for k, v in small.items() if k in _NEEDED}})
    if parsed is None or any(_field(sentence) in _NEEDED for sentence in violations(parsed, "spec")):
        return None
    return parsed


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
