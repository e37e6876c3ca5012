"""What a drafter takes of a device: its weights, its layers' KV, and the concurrency that these cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outrider_crds.runtime_state import MEMORY_WORDS, DrafterMemory
from outrider_runtime.vllm_plugin.memory import (
    MemoryUse,
    does_not_fit,
    drafter_memory,
    heaviest,
    kv_bytes_per_token,
    kv_tokens,
    left_out_to_fit,
    no_room_for_graphs,
    weight_bytes,
)
from outrider_runtime.worker_notes import read_drafter_memory, write_drafter_memory
from torch import nn


def test_what_a_head_shares_with_the_target_costs_nothing() -> None:
    """Embedding and head of the target are the drafter's, too; a tensor that it holds twice counts once."""
    target, head = nn.Module(), nn.Module()
    target.embed = head.embed = nn.Embedding(100, 8)
    head.fc = nn.Linear(24, 8, bias=False)
    head.again = head.fc.weight
    assert weight_bytes(head, target) == 24 * 8 * 4
    assert weight_bytes(target, target) == 0


def test_weights_that_a_cpu_has_packed_count_too() -> None:
    """Bug: of a head on a CPU the output layer alone was counted; the packed layers' own tensors are empty."""
    packed: Any = nn.Module()
    packed.weight = nn.Parameter(torch.empty(0))
    packed.input_size, packed.output_size, packed.output_size_per_partition = 24, 8, 4
    packed.params_dtype = torch.bfloat16
    assert weight_bytes(nn.Sequential(packed, nn.Linear(2, 2, bias=False)), nn.Module()) == 24 * 4 * 2 + 4 * 4


def kv_config(*groups: tuple[dict[str, int], int], blocks: int = 10) -> Any:
    """groups: bytes of a block by layer, and tokens of a block."""
    made = []
    for layers, size in groups:
        specs = {name: SimpleNamespace(page_size_bytes=count, block_size=size) for name, count in layers.items()}
        spec = SimpleNamespace(kv_cache_specs=specs, block_size=size)
        made.append(SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec))
    return SimpleNamespace(kv_cache_groups=made, num_blocks=blocks)


def test_a_token_takes_kv_in_each_layer() -> None:
    config = kv_config(({"target.0": 160, "target.1": 160, "head.0": 32}, 16), ({"window.0": 64}, 8))
    assert kv_bytes_per_token(config) == 10 + 10 + 2 + 8
    assert kv_bytes_per_token(config, {"head.0"}) == 2


def test_a_token_takes_a_part_of_a_block_in_each_group_of_layers() -> None:
    """Bug: with two groups twice the tokens were counted that fit, so weights seemed to cost half of what they do."""
    target_group, other = ({"target.0": 160}, 16), ({"window.0": 160}, 16)
    assert kv_tokens(kv_config(target_group)) == 160
    assert kv_tokens(kv_config(target_group, other)) == 80
    assert kv_tokens(kv_config(({"target.0": 160}, 16), ({"window.0": 80}, 8), blocks=30)) == 160
    assert kv_tokens(kv_config()) == 0


def test_layers_of_one_kind_have_one_spec() -> None:
    spec = SimpleNamespace(page_size_bytes=160, block_size=16)
    group = SimpleNamespace(layer_names=["target.0", "head.0"], kv_cache_spec=spec)
    assert kv_bytes_per_token(SimpleNamespace(kv_cache_groups=[group]), {"head.0"}) == 10


def test_weights_cost_concurrency_if_they_leave_less_kv() -> None:
    """100 tokens of 10 bytes; without the drafter's 2 bytes a token and 600 bytes of weights it would be 200."""
    assert drafter_memory(600, 2, 10, 100, shares_with_kv=True).concurrency_percent == 50
    assert drafter_memory(600, 2, 10, 100, shares_with_kv=False).concurrency_percent == 20


TAKES = {"head": MemoryUse(80, 2), "draft": MemoryUse(300, 40), "twin": MemoryUse(300, 41)}


def test_largest_drafters_are_left_out_first() -> None:
    """No more than needed are left out. Weights free no room on a CPU. None is left out if the target does not fit."""
    assert left_out_to_fit(TAKES, 41, shares_with_kv=False) == ["twin"]
    assert left_out_to_fit(TAKES, 42, shares_with_kv=False) == ["twin", "draft"]
    assert left_out_to_fit(TAKES, 341, shares_with_kv=True) == ["twin"]
    assert left_out_to_fit(TAKES, 84, shares_with_kv=False) == []


def test_what_each_drafter_takes_is_named() -> None:
    said = does_not_fit({"head": MemoryUse(80 << 20, 2 << 20)}, 100 << 20, 120 << 20, 8192)
    assert "100 MiB are left for KV, a request of 8192 tokens takes 120 MiB" in said
    assert "head takes 80 MiB of weights and 2 MiB" in said


def test_reports_drafter_to_drop_when_graph_capture_is_oom() -> None:
    """Bug: memory that ended while graphs were captured ended the pod, again at every start."""
    takes = {"head": MemoryUse(800 << 20, 10), "draft": MemoryUse(2000 << 20, 1)}
    assert heaviest(takes) == "draft"
    assert heaviest({}) is None
    assert "draft takes 2000 MiB of weights" in no_room_for_graphs("draft", takes["draft"])


def test_operator_reads_a_lack_of_memory_from_the_reason() -> None:
    takes = {"head": MemoryUse(800 << 20, 10)}
    for said in (does_not_fit(takes, 100 << 20, 120 << 20, 8192), no_room_for_graphs("head", takes["head"])):
        assert any(words in said for words in MEMORY_WORDS)


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**9), st.booleans())
def test_a_share_is_one(weights: int, own: int, target: int, tokens: int, shares_with_kv: bool) -> None:
    made = drafter_memory(weights, own, own + target, tokens, shares_with_kv=shares_with_kv)
    assert 0 <= made.concurrency_percent <= 100


def test_the_core_reads_what_the_worker_wrote(tmp_path: Path) -> None:
    assert read_drafter_memory(tmp_path) == {}
    costs = {"head": DrafterMemory(weight_bytes=600, kv_bytes_per_token=2, concurrency_percent=12.34)}
    write_drafter_memory(tmp_path, costs)
    assert read_drafter_memory(tmp_path) == costs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_count_as_they_are_stored(dtype: torch.dtype) -> None:
    assert weight_bytes(nn.Linear(4, 4, bias=False).to(dtype), nn.Module()) == 16 * dtype.itemsize
