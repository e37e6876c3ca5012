"""The multi-token prediction (MTP) layer of the target's own checkpoint: one pass for each token.

It reads the target's last hidden state. The engine treats it as an EAGLE head: a KV gap stays, and costs little.
"""

from __future__ import annotations

from outrider_crds.spec import Backend

from outrider_runtime.drafters.draft_configs import MTP_FIELDS, ModelPair
from outrider_runtime.drafters.method import Method

ONE_UNSAID = frozenset((
    "dots3_note", "exaone4_5", "exaone_moe", "hy_v4", "longcat_flash", "minimax_m3_vl", "qwen3_next",
))  # fmt: skip
"""Model types for which vLLM loads one MTP module if the config does not count them."""
FIRST_ONLY = frozenset(("mimo_v2", "mimo_v2_flash", "mimo_v2_omni"))
"""Model types of which vLLM loads the first MTP module, however many there are."""


def obstacle(models: ModelPair) -> str:
    names, kind, layers = models.target.names, models.target.model_type, models.target.mtp_layers
    if kind in FIRST_ONLY or (kind in ONE_UNSAID and layers is None):
        return ""
    if not layers:
        return (
            f"the target ({names}) has no MTP layers: its config names none ({', '.join(MTP_FIELDS)}); use another "
            "method for it"
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
