"""A condition's verdict before it is dated."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.status import ConditionReason, ConditionStatus, ConditionType


@dataclass(frozen=True)
class Verdict:
    status: ConditionStatus
    reason: ConditionReason
    message: str = ""


Verdicts = dict[ConditionType, Verdict]


def true(reason: ConditionReason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.TRUE, reason, message)


def false(reason: ConditionReason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.FALSE, reason, message)


def unknown(reason: ConditionReason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.UNKNOWN, reason, message)
