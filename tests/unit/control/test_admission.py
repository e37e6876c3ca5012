"""Which requests wait while a class with a tight TPOT decodes."""

from __future__ import annotations

import numpy as np
import pytest
from outrider_runtime.control.batch import Waiting
from outrider_runtime.control.plans import nothing_proposed
from outrider_runtime.control.settings import Drafter, HotSettings, SLOClass
from outrider_runtime.control.step_times import StepCost

from tests.unit.control.columns import batch
from tests.unit.control.engine import controller, profile

HEAD = Drafter("head", passes=True, needs_hidden=True)
TARGET = StepCost(per_batched_token_s=1e-3, constant_s=0.010)
"""11 ms for one request, 14 ms for four."""


@pytest.mark.parametrize(("tpot_s", "admit"), [(0.030, 4), (0.015, 0), (0.001, None)])
def test_requests_wait_for_a_tpot_that_can_be_met(tpot_s: float, admit: int | None) -> None:
    """A TPOT that even a single request could not meet holds no request back."""
    loop = controller((HEAD,), profile(TARGET, {}), hot=HotSettings(slo_classes=(SLOClass("tight", tpot_s),)))
    running = batch(4, slo_class=np.zeros(4, np.int64), next=Waiting(0, 64, 100), waiting=1)
    assert loop.plan_verify(running, nothing_proposed(4, 1)).admit == admit
