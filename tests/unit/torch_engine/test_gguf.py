"""A model folder with a GGUF file in place of config.json and safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.kv_pool import Holder, KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel, Segment
from transformers import AutoModelForCausalLM

from tests.unit.torch_engine.models import SIZES, VOCABULARY

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH, INNER = 4, 2, SIZES["hidden_size"], SIZES["intermediate_size"]


def write_gguf(file: Path) -> None:
    """Write a random Llama of one layer with tied embeddings."""
    from gguf import GGUFWriter  # half a second, for what a few tests write

    draws = torch.Generator().manual_seed(0)
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    narrow = KV_HEADS * WIDTH // HEADS
    shapes = {
        "token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,), "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,), "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (narrow, WIDTH),
        "blk.0.attn_v": (narrow, WIDTH), "blk.0.attn_output": (WIDTH, WIDTH), "blk.0.ffn_gate": (INNER, WIDTH),
        "blk.0.ffn_up": (INNER, WIDTH), "blk.0.ffn_down": (WIDTH, INNER),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (torch.randn(*shape, generator=draws) * 0.3).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_logits_equal_transformers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    ours = CachedModel(tmp_path, 0, dtype=torch.float32, device=CPU)
    pool = KVPool(1 << 20, [ours.cache.bytes_per_token])
    text = list(range(20))
    assert pool.grow(Holder(0, "r"), len(text))
    logits = ours.decoder.logits(ours.run([Segment("r", text, 0)], pool).last)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0]
    assert (logits - expected).abs().max() < 1e-4


def test_truncated_gguf_is_refused_by_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UnsupportedModelError, match=rf"{file} cannot be read"):
        CachedModel(tmp_path, 0, dtype=torch.float32, device=CPU)
