"""Adapters that were trained for another model, at vLLM's own manager of adapters over a tiny model, without an engine.

What a server makes of the sentences is in test_adapters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_runtime.server.vllm_backend import engine_sentence
from safetensors.torch import load_file, save_file

from tests.engine.test_request_kinds import write_adapter

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
Change = Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def manager(target: Path, tmp_path: Path) -> Iterator[Any]:
    """vLLM's manager over the target, as a worker makes it."""
    from outrider_runtime.vllm_plugin import cpu_worker  # noqa: F401 (binds vLLM's kernels before others do)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(target), skip_tokenizer_init=True, load_format="dummy", dtype="float32", max_model_len=64,
        enforce_eager=True, enable_lora=True, max_loras=2, max_lora_rank=8, max_num_seqs=4,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
        made = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
        made.create_lora_manager(model, config)
        yield made
        cleanup_dist_env_and_memory()


def loads(manager: Any, target: Path, folder: Path, number: int, change: Change) -> str:
    """Load a random adapter whose weights `change` made; returns what the manager raised, empty if it took it."""
    from vllm.lora.request import LoRARequest

    write_adapter(folder, seed=number, target=target)
    weights = load_file(folder / "adapter_model.safetensors")
    changed = dict(change(name, weight) for name, weight in weights.items())
    save_file({name: weight.contiguous() for name, weight in changed.items()}, folder / "adapter_model.safetensors")
    try:
        manager.add_adapter(LoRARequest(f"adapter-{number}", number, str(folder)))
    except Exception as error:
        manager.remove_adapter(number)
        return engine_sentence(str(error))
    return ""


MISFITS: dict[str, tuple[Change, bool, str]] = {
    "half as wide": (
        lambda name, weight: (name, weight[:, :32] if "q_proj.lora_A" in name else weight), True,
        "its model.layers.0.self_attn.q_proj takes 32 numbers and makes 64, the target's 64 and 64",
    ),
    "fewer values": (
        lambda name, weight: (name, weight[:16] if "v_proj.lora_B" in name else weight), True,
        "its model.layers.0.self_attn.v_proj takes 64 numbers and makes 16, the target's 64 and 32",
    ),
    "more layers": (
        lambda name, weight: (name.replace("layers.1.", "layers.9."), weight), True,
        "it changes model.layers.9.mlp.down_proj, which the target does not have",
    ),
    "other modules": (
        lambda name, weight: (name.replace("q_proj", "wqkv"), weight), False,
        "it changes model.layers.0.self_attn.wqkv, which the target does not have",
    ),
}  # fmt: skip
"""A change of the weights, whether vLLM itself takes them, and our sentence."""


def test_an_adapter_for_another_model_is_refused(manager: Any, target: Path, tmp_path: Path) -> None:
    """vLLM copies a smaller adapter into a corner of its tensors, and serves one of more layers without these."""
    from outrider_runtime.vllm_plugin.adapter_shapes import check_each

    for number, (change, is_taken, _) in enumerate(MISFITS.values(), 1):
        said = loads(manager, target, tmp_path / str(number), number, change)
        assert (said == "") == is_taken
    check_each(manager)
    assert loads(manager, target, tmp_path / "fits", 10, lambda name, weight: (name, weight)) == ""
    for number, (change, _, sentence) in enumerate(MISFITS.values(), 20):
        said = loads(manager, target, tmp_path / str(number), number, change)
        assert said == f"it does not fit the target: {sentence}"
