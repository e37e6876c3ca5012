"""Shapes of models whose steps are composed, with the values of their config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Layer counts and widths of a Llama-like model."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV per token, in 16 bits."""
        return 4 * self.layers * self.key_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in 16 bits, one table of the vocabulary included."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_heads)
        return 2 * (self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary)

    def config(self) -> dict[str, Any]:
        """Make a minimal config.json."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "head_dim": self.head_dim,
            "num_attention_heads": self.heads, "num_key_value_heads": self.key_heads,
            "intermediate_size": self.intermediate, "vocab_size": self.vocabulary,
            "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        }  # fmt: skip


LLAMA_8B = ModelShape(32, 4096, 32, 8, 14336, 128256)
LLAMA_70B = ModelShape(80, 8192, 64, 8, 28672, 128256)
LLAMA_1B = ModelShape(16, 2048, 16, 4, 8192, 128256)
"""Its 32 and 8 heads of 64 count as 16 and 4 heads of 128: the width is the same, and all systems have times of 128."""
LLAMA_160M = ModelShape(12, 768, 6, 6, 3072, 32000)
"""Its 12 heads of 64 count as 6 heads of 128."""
VICUNA_7B = ModelShape(32, 4096, 32, 32, 11008, 32000)
VICUNA_33B = ModelShape(60, 6656, 52, 52, 17920, 32000)
KNOWN = {
    "llama3.18b": LLAMA_8B,
    "llama3.170b": LLAMA_70B,
    "llama3.21b": LLAMA_1B,
    "llama160m": LLAMA_160M,
    "vicuna7bv1.5": VICUNA_7B,
    "vicuna33bv1.3": VICUNA_33B,
}
"""Shapes by name (`named_models.plain`) that need no package."""
EAGLE_VOCABULARY = 32000  # of the published EAGLE-3 head for Llama-3.1-8B


def eagle_head(target: ModelShape) -> ModelShape:
    """Return the shape of an EAGLE-3 head: one layer of the target's width, and a smaller vocabulary."""
    return ModelShape(
        1, target.hidden, target.heads, target.key_heads, target.intermediate, EAGLE_VOCABULARY, target.head_dim
    )
