"""A condition's verdict before it is dated."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_crds.status import ConditionStatus, ConditionType, Reason


@dataclass(frozen=True)
class Verdict:
    status: ConditionStatus
    reason: Reason
    message: str = ""


Verdicts = dict[ConditionType, Verdict]


def true(reason: Reason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.TRUE, reason, message)


def false(reason: Reason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.FALSE, reason, message)


def unknown(reason: Reason, message: str = "") -> Verdict:
    return Verdict(ConditionStatus.UNKNOWN, reason, message)
