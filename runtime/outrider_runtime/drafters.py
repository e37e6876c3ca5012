"""What the control core has to know of a drafter of the API's pool."""

from __future__ import annotations

from outrider_crds.spec import Drafter, DraftMethod

from outrider_runtime.control.settings import DrafterSpec


def drafter_spec(drafter: Drafter) -> DrafterSpec:
    """Whether proposals over a hole in the draft's KV are junk hangs on the method: measured on SmolLM2, k = 2,
    accepted per trial.

    A draft model (the target itself) falls from 1.00 to 0.73 after 16 skipped steps and to 0.60 after 40, and lost
    acceptance stays lost until a catch-up has closed the hole: then it is 1.00 again. The EAGLE-3 head stays at 0.36
    whatever was skipped, its whole prompt included: it lives on the target's hidden states.
    """
    return DrafterSpec(
        drafter.name,
        neural=drafter.neural is not None,
        needs_whole_kv=drafter.method is DraftMethod.DRAFT_MODEL,
    )
