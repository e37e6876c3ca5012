"""Suffix decoding: accepted by the API, hosted by no engine."""

from __future__ import annotations

from outrider_crds.spec import Backend

from outrider_runtime.control.settings import MATCH_EDGES
from outrider_runtime.drafters.method import Method

METHOD = Method(
    confidence_edges=MATCH_EDGES,
    unsupported=dict.fromkeys(
        Backend, "Unsupported: the engine has no suffix decoding; remove the drafter, or use PromptLookup in its place"
    ),
)
