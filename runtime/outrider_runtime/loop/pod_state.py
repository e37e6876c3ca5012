"""The state document of a pod, made from the loop's counters."""

from __future__ import annotations

from collections.abc import Mapping

from outrider_crds.counters import DrafterCounters, SpeedupCounters
from outrider_crds.runtime_state import ChoiceState, DrafterMemory, DrafterReport

from outrider_runtime.control import state as control
from outrider_runtime.loop.control_loop import ControlLoop

LEAST_USERS = 0.05
"""Fewest requests in the mean of the last steps that make a drafter the favourite."""


def speedup(state: control.State) -> SpeedupCounters:
    counts = state.probes
    return SpeedupCounters(
        probes=counts.probes,
        baseline_tokens=round(counts.plain_tokens),
        baseline_s=counts.plain_s,
        speculative_tokens=round(counts.speculative_tokens),  # scaled to the probes' time, so not an integer
        speculative_s=counts.plain_s,
        weight=counts.weight,
        weighted_ratio=counts.weighted_ratio,
    )


def choice(loop: ControlLoop, state: control.State) -> ChoiceState:
    return ChoiceState(
        drafter=_favourite(loop, state),
        draft_tokens=state.tally.recent_length,
        reason=state.reason.value,
        has_disabled_drafts=state.has_disabled_drafts,
        running=loop.running,
    )


def _favourite(loop: ControlLoop, state: control.State) -> str:
    """Name of the drafter that most requests of the last steps used; empty if none was used."""
    users = state.tally.users
    return loop.hosted[int(users.argmax())].name if users.max(initial=0.0) > LEAST_USERS else ""


def drafters(loop: ControlLoop, state: control.State, memory: Mapping[str, DrafterMemory]) -> list[DrafterReport]:
    """Return the state of each drafter of the pool, in its order. memory: device memory by drafter."""
    names = [drafter.name for drafter in loop.boot.draft_pool]
    return [_drafter(name, loop, state, memory.get(name)) for name in names]


def _drafter(name: str, loop: ControlLoop, state: control.State, memory: DrafterMemory | None) -> DrafterReport:
    if name in loop.left_out:
        return DrafterReport(name=name, loaded=False, reason=loop.left_out[name])
    seen = state.drafters.get(name, control.DrafterState())
    return DrafterReport(
        name=name,
        kind=loop.blocks[name].kind if name in loop.blocks else "",
        loaded=True,
        reason=seen.suspended,
        **dict(DrafterCounters.part_of(seen)),
        memory=memory,
    )
