"""The multi-token prediction layer of the target's own checkpoint: a pass a token over the target's last hidden state.

To the engine it is an EAGLE head that the target brings along: a KV gap stays, and costs little.
"""

from __future__ import annotations

from outrider_crds.spec import Backend

from outrider_runtime.drafters.draft_configs import Models
from outrider_runtime.drafters.method import Method


def obstacle(models: Models) -> str:
    layers, names = models.target.mtp_layers, models.target.names
    if not layers:
        return (
            f"the target ({names}) has no MTP layers: its config names none (num_nextn_predict_layers, "
            "mtp_num_hidden_layers); use another method for it"
        )
    if layers > 1:
        return f"the target ({names}) has {layers} MTP modules, and one alone is served: use another method for it"
    return ""


METHOD = Method(
    passes=True,
    needs_hidden=True,
    obstacle=obstacle,
    unsupported={Backend.TORCH: "Unsupported: the Torch backend loads no MTP layers; use engine.backend vLLM"},
)
