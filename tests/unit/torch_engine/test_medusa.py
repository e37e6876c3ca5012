"""Medusa heads in the Torch backend: answers equal plain decoding, and unfit heads are refused by file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_crds.runtime_config import BootConfig
from outrider_crds.spec import Backend
from outrider_runtime.drafters.pool import ModelPlaces, choose_pool
from outrider_runtime.torch_engine.architecture import UnsupportedModelError
from outrider_runtime.torch_engine.drafting import CommittedStep, DraftTask, RequestStep, TorchDrafter
from outrider_runtime.torch_engine.drafts.medusa_drafter import MedusaDrafter, MedusaWeights
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from outrider_runtime.torch_engine.kv_pool import KVPool
from outrider_runtime.torch_engine.model_runner import CachedModel
from safetensors.torch import load_file, save_file

from tests.engine import engines
from tests.unit.torch_engine.engines import CPU, DRAWN, GREEDY, Letters, answers, make_harness
from tests.unit.torch_engine.models import SIZES, VOCABULARY, write_medusa
from tests.unit.torch_engine.test_engine_loading import boot, started


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    write_medusa(tmp_path / "heads")
    return tmp_path / "heads"


def make(heads: Path) -> Any:
    def drafters(target: CachedModel, _pool: KVPool) -> list[TorchDrafter]:
        return [MedusaDrafter(heads, target)]

    return drafters


@pytest.mark.parametrize("width", [1, 3], ids=["chains", "trees"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, pytest.param(DRAWN, marks=pytest.mark.slow)], ids=["greedy", "drawn with a seed"]
)
def test_answer_with_medusa_equals_plain(folder: Path, heads: Path, sampling: Sampling, width: int) -> None:
    plain = answers(make_harness(folder), sampling)
    harness = make_harness(folder, [engines.medusa(heads)], make(heads), draft_bytes=[0])
    harness.loop.pin(3, "medusa", width)
    assert answers(harness, sampling) == plain
    assert harness.loop.state().drafters["medusa"].tried > 0


def test_medusa_tree_is_best_part_of_cartesian_product(folder: Path, heads: Path) -> None:
    """The reference is brute force: the greatest products over all pairs of kept first tokens and second tokens."""
    target = CachedModel(folder, 0, dtype=torch.float32, device=CPU)
    drafter = MedusaDrafter(heads, target)
    state = torch.randn(1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
    request = Request("r", [1, 2, 3], 3, Stops(10), GREEDY, Letters())
    step = CommittedStep(
        [RequestStep(request, 0, 0, [0, 1])], {target.shape.layers: torch.cat([torch.zeros_like(state), state])}
    )
    (tree,) = drafter.propose(step, DraftTask(0, [True], 2, 3))
    output = target.decoder.output.rows(drafter.weights._vocabulary)
    first, second = ((state_of_depth @ output.T).softmax(-1)[0] for state_of_depth in drafter.weights.states(state)[:2])
    best = first.topk(3)
    pairs = {(a, b): float(best.values[a] * second[b]) for a in range(3) for b in range(len(second))}
    best_pairs = sorted(pairs, key=lambda pair: -pairs[pair])[:3]
    tokens = drafter.weights._vocabulary
    assert [tree.path(node) for node in range(3)] == [[int(tokens[place])] for place in best.indices]
    assert [tree.path(node) for node in range(3, 6)] == [
        [int(tokens[best.indices[a]]), int(tokens[b])] for a, b in best_pairs
    ]


def test_medusa_tree_is_no_deeper_than_its_heads(folder: Path, heads: Path) -> None:
    target = CachedModel(folder, 0, dtype=torch.float32, device=CPU)
    request = Request("r", [1, 2], 2, Stops(10), GREEDY, Letters())
    step = CommittedStep([RequestStep(request, 0, 0, [0])], {target.shape.layers: torch.ones(1, SIZES["hidden_size"])})
    (tree,) = MedusaDrafter(heads, target).propose(step, DraftTask(0, [True], 9, 1))
    assert len(tree) == 3


def changed(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_heads_without_a_tensor_are_refused_by_its_name(folder: Path, heads: Path) -> None:
    tensors = load_file(heads / "model.safetensors")
    del tensors["heads.1.block.bias"]
    save_file(tensors, heads / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"heads has no tensor heads\.1\.block\.bias"):
        MedusaWeights(heads, CachedModel(folder, 0, dtype=torch.float32, device=CPU))


def test_heads_of_other_width_are_refused_by_field(folder: Path, heads: Path, tmp_path: Path) -> None:
    """The configuration is checked before the weights are loaded; the pod serves without the heads."""
    changed(heads, hidden_size=99)
    loaded = started(boot(folder, [engines.medusa(heads)]), tmp_path)
    (medusa,) = loaded.reporter.state().drafters
    assert not medusa.loaded
    assert f"{heads}/config.json: hidden_size is 99, the target's hidden states are 24 wide" in medusa.reason


def test_model_without_heads_is_left_out(folder: Path) -> None:
    pool = choose_pool(boot(folder, [engines.medusa(folder)]), ModelPlaces(mounted=False))
    assert "has no medusa_num_heads" in pool.dropped["medusa"]


def test_vllm_leaves_medusa_heads_out_with_reason(folder: Path, heads: Path) -> None:
    config: BootConfig = boot(folder, [engines.medusa(heads), engines.sparse_self(32)], backend=Backend.VLLM)
    pool = choose_pool(config, ModelPlaces(mounted=False))
    assert "vLLM's model runner has no Medusa heads" in pool.dropped["medusa"]
    assert [spec.name for spec in pool.hosted] == ["self"]
    torch_pool = choose_pool(boot(folder, config.draft_pool), ModelPlaces(mounted=False))
    assert [spec.name for spec in torch_pool.hosted] == ["medusa"]
    assert "SparseSelf" in torch_pool.dropped["self"]


def test_medusa_memory_is_reported(folder: Path, heads: Path, tmp_path: Path) -> None:
    """The heads' own weights and their part of the output layer count; they have no KV."""
    loaded = started(boot(folder, [engines.medusa(heads)]), tmp_path)
    (medusa,) = loaded.reporter.state().drafters
    assert medusa.loaded
    assert medusa.memory is not None
    width, vocabulary = SIZES["hidden_size"], VOCABULARY // 2
    assert medusa.memory.weight_bytes == 4 * (3 * (2 * width * width + width) + vocabulary * width + vocabulary)
    assert medusa.memory.kv_bytes_per_token == 0
