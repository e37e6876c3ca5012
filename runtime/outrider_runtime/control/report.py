"""What the state endpoint is told about the loop."""

from __future__ import annotations

import dataclasses

from outrider_runtime.control.counters import ControllerSnapshot, DrafterCounters, Reason
from outrider_runtime.control.evidence import Evidence
from outrider_runtime.control.roster import Roster
from outrider_runtime.control.settings import Mode

LEAST_STEPS = 20
"""Before so many steps nothing is said about the worth of speculation."""
IDLE_S = 10.0
"""No step for so long means no traffic."""


def snapshot(
    evidence: Evidence, roster: Roster, *, gated: bool, decision_s: float, now: float | None
) -> ControllerSnapshot:
    """`now`, if given, tells an idle engine from a busy one."""
    evidence.settle()
    tally = evidence.tally
    return ControllerSnapshot(
        reason=_reason(evidence, roster, now),
        drafter=tally.favourite,
        draft_tokens=tally.recent_length,
        gated=gated,
        running=tally.running,
        learning=evidence.latency.learning,
        goodput_tokens_per_s=evidence.goodput.tokens_per_s,
        steps=tally.steps,
        speculative_steps=tally.speculative_steps,
        output_tokens=tally.output_tokens,
        busy_s=tally.busy_s,
        proposed_tokens=tally.proposed_tokens,
        draft_length_steps=tuple(tally.draft_length_steps),
        dropped_steps=tally.dropped_steps,
        decision_s=decision_s,
        caught_up_tokens=tally.caught_up_tokens,
        catch_up_s=tally.catch_up_s,
        drafters={name: _drafter(evidence, roster, name) for name in roster.names},
        speedup=evidence.truth.counters,
    )


def _drafter(evidence: Evidence, roster: Roster, name: str) -> DrafterCounters:
    number = evidence.acceptance.index[name]
    return dataclasses.replace(
        evidence.tally.drafter(name),
        suspended=roster.suspended.get(name, ""),
        hazards=tuple(evidence.acceptance.hazards[number].tolist()),
        hit_rate=float(evidence.acceptance.hit_rates[number, 0]),
    )


def _reason(evidence: Evidence, roster: Roster, now: float | None) -> Reason:
    tally = evidence.tally
    if roster.silent:
        return Reason.OFF
    if not roster.anyone:
        return Reason.NO_DRAFTER
    if tally.steps == 0 or (now is not None and now - tally.last_step_at > IDLE_S):
        return Reason.NO_TRAFFIC
    if tally.recent_speculation < 0.5:
        return Reason.NOT_WORTH_IT if tally.steps >= LEAST_STEPS else Reason.MEASURING
    measured = evidence.truth.counters.probes > 0 or roster.hot.mode is Mode.STATIC
    return Reason.PAYS if measured else Reason.MEASURING
