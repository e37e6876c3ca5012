"""What is left of a spec that this release cannot read: scale, kill switch and SLO classes go through all the same."""

from __future__ import annotations

from typing import Any

from outrider_crds.rules import violations
from outrider_crds.spec import SpeculativeServiceSpec
from pydantic import ValidationError

from outrider_operator.decide.revisions import Revision
from outrider_operator.model import PODLESS_FIELDS, Object

_NEEDED = {"replicas", "paused", "speculation", "sloClasses", "defaultSLOClass"}
"""A default in place of one of these would change what pods do."""


def readable_spec(spec: Object, running: Revision) -> SpeculativeServiceSpec | None:
    """The fields of `spec` that make no revision, over the pool, hardware and engine of `running`.

    None where one of them cannot be read either, or was left out of the copy that is kept of a large spec.
    """
    if "replicas" not in spec:
        return None
    boot = running.boot.wire()
    kept = {name: boot[name] for name in ("target", "draftPool", "accelerator", "engine")}
    small = {name: spec[name] for name in PODLESS_FIELDS if name in spec}
    parsed = _parsed({**kept, **small}) or _parsed({**kept, **{k: v for k, v in small.items() if k in _NEEDED}})
    if parsed is None or any(_field(sentence) in _NEEDED for sentence in violations(parsed, "spec")):
        return None
    return parsed


def _parsed(fields: dict[str, Any]) -> SpeculativeServiceSpec | None:
    try:
        return SpeculativeServiceSpec.model_validate(fields, extra="ignore")
    except ValidationError:
        return None


def _field(sentence: str) -> str:
    """ "speculation" of "spec.speculation.mode: ..."."""
    return sentence.partition(":")[0].removeprefix("spec.").partition(".")[0].partition("[")[0]
