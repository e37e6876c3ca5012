"""The multi-token prediction (MTP) layer of the target's own checkpoint: one pass for each token.

It reads the target's last hidden state. The engine treats it as an EAGLE head: a KV gap stays, and costs little.
"""

from __future__ import annotations

from outrider_crds.spec import Backend

from outrider_runtime.drafters.draft_configs import ModelPair
from outrider_runtime.drafters.method import Method


def obstacle(models: ModelPair) -> str:
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
    autoregressive=True,
    needs_hidden=True,
    obstacle=obstacle,
    unsupported={Backend.TORCH: "Unsupported: the Torch backend loads no MTP layers; use engine.backend vLLM"},
)
