"""Notice that two writers set `spec.replicas` in turn, such as an autoscaler and a manifest in Git.

Each undoes what the other did, so that pods come and go. Each write by itself is a good one: only their order tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONTEST_S = 6 * 3600.0
"""Seconds for which a write counts. Argo CD and Flux write what stands in Git every few minutes, or once an hour."""
_TURNS = 4
"""Writes in turn that are a contest: one change by hand under an autoscaler leaves three."""


@dataclass(frozen=True)
class ReplicaWriter:
    """A manager of `spec.replicas`, and the Unix time at which it was first seen in its turn."""

    manager: str
    at: float


def noted(turns: Sequence[ReplicaWriter], manager: str, at: float) -> tuple[ReplicaWriter, ...]:
    """The turns with the field's present `manager`; empty: it has none."""
    recent = tuple(turn for turn in turns if at - turn.at < CONTEST_S)
    if not manager or (recent and recent[-1].manager == manager):
        return recent
    return (*recent, ReplicaWriter(manager, at))[-_TURNS:]


def rivals(turns: Sequence[ReplicaWriter]) -> tuple[str, ...]:
    """The two managers that wrote in turn; empty without a contest."""
    managers = [turn.manager for turn in turns]
    pair = tuple(sorted({*managers}))
    return pair if len(managers) == _TURNS and len(pair) == 2 else ()
