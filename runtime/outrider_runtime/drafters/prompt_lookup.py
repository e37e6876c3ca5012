"""Prompt lookup: what followed the last tokens where they stood before. One search a step, however long the proposal;
its confidence is the length of the match."""

from __future__ import annotations

from outrider_runtime.control.settings import MATCH_EDGES
from outrider_runtime.drafters.method import Method

METHOD = Method(confidence_edges=MATCH_EDGES)
