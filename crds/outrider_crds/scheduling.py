"""A toleration as Kubernetes has it, closed and bounded: the operator judges nodes by those of `accelerator`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from outrider_crds.base import KubernetesModel
from outrider_crds.names import LabelKey, LabelValue


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(KubernetesModel):
    key: LabelKey | None = None
    """Taint key. Absent: every key; operator must then be Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """Equal (the default) compares the value; Exists takes any."""
    value: LabelValue | None = None
    """Taint value; for Equal."""
    effect: TaintEffect | None = None
    """Taint effect. Absent: every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds that a NoExecute taint is tolerated. Absent: for ever."""
