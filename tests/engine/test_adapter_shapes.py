"""Adapters that cannot give their own answers, at vLLM's own manager of adapters over a tiny model, without an engine.

What a server makes of the sentences is in test_adapters.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from itertools import product
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
def manager(target: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """vLLM's manager over the target, as a worker makes it. Parameter: arguments of the engine."""
    from outrider_runtime.vllm_plugin import cpu_worker  # noqa: F401 (binds vLLM's kernels before others do)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(target), skip_tokenizer_init=True, load_format="dummy", dtype="float32", max_model_len=64,
        enforce_eager=True, enable_lora=True, max_loras=2, max_lora_rank=8, max_num_seqs=4,
        **getattr(request, "param", {}),
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
        made = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
        made.create_lora_manager(model, config)
        yield made
        cleanup_dist_env_and_memory()


def loads(manager: Any, target: Path, folder: Path, number: int, change: Change, **config: Any) -> str:
    """Load a random adapter whose weights `change` made; returns what the manager raised, empty if it took it.

    config: fields of adapter_config.json.
    """
    write_adapter(folder, seed=number, target=target)
    weights = load_file(folder / "adapter_model.safetensors")
    changed = dict(change(name, weight) for name, weight in weights.items())
    save_file({name: weight.contiguous() for name, weight in changed.items()}, folder / "adapter_model.safetensors")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return added(manager, folder, number)


def added(manager: Any, folder: Path, number: int) -> str:
    """Load an adapter; returns what the manager raised, empty if it took it."""
    from vllm.lora.request import LoRARequest

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


def unchanged(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name, weight


def with_number(part: str, number: float) -> Change:
    """Put `number` into one weight of the tensor that this is part of the name of."""

    def change(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        if part in name:
            weight[-1, -1] = number
        return name, weight

    return change


BROKEN: dict[str, tuple[Change, dict[str, Any], str]] = {
    "NaN in A": (
        with_number("layers.1.self_attn.q_proj.lora_A", torch.nan), {},
        "its model.layers.1.self_attn.q_proj has lora_A with NaN: train or save it again",
    ),
    "infinite B": (
        with_number("layers.0.mlp.down_proj.lora_B", -torch.inf), {},
        "its model.layers.0.mlp.down_proj has lora_B with infinite numbers (in float32): train or save it again",
    ),
    "too large once scaled": (
        with_number("lm_head.lora_B", 3e38), {"lora_alpha": 64},
        "its lm_head has lora_B with infinite numbers (in float32): train or save it again",
    ),
    "another rank than it says": (
        unchanged, {"r": 4},
        "its lm_head has weights of rank 8, and adapter_config.json says 4",
    ),
    "two ranks": (
        lambda name, weight: (name, weight[:, :4] if "lm_head.lora_B" in name else weight), {},
        "its lm_head has weights of rank 4 and 8, and adapter_config.json says 8",
    ),
}  # fmt: skip
"""A change of the weights, one of the config, and our sentence."""


def test_an_adapter_with_broken_weights_is_refused(manager: Any, target: Path, tmp_path: Path) -> None:
    """Bug: an adapter with NaN weights was served, and its KV made every later answer of the pod empty."""
    from outrider_runtime.vllm_plugin.adapter_shapes import check_each

    check_each(manager)
    for number, (change, config, sentence) in enumerate(BROKEN.values(), 1):
        assert loads(manager, target, tmp_path / str(number), number, change, **config) == sentence
    assert loads(manager, target, tmp_path / "good", 10, unchanged) == ""


def test_an_adapter_with_half_a_module_is_refused(manager: Any, target: Path, tmp_path: Path) -> None:
    """Bug: a module with lora_A alone was an error of the engine's own without a reason."""
    from outrider_runtime.vllm_plugin.adapter_shapes import check_each

    check_each(manager)

    def halved(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        return name.replace("layers.0.mlp.down_proj.lora_B", "layers.0.mlp.up_proj.lora_B"), weight

    said = loads(manager, target, tmp_path / "half", 1, halved)
    assert said == "its model.layers.0.mlp.down_proj has no lora_B: save it again, whole"


def test_an_adapter_with_trained_embeddings_is_refused(manager: Any, target: Path, tmp_path: Path) -> None:
    """vLLM leaves them out. Those that PEFT saves untrained, as it does with an embedding's LoRA, do no harm.

    Bug: those of adapter_model.bin and .pt were left out without a word."""
    from outrider_runtime.vllm_plugin.adapter_shapes import check_each

    check_each(manager)
    own = manager._adapter_manager.model.model.embed_tokens
    own = getattr(own, "base_layer", own).weight[: SHAPE["vocab_size"]]
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    saves: dict[str, Callable[..., None]] = {"safetensors": save_file, "bin": torch.save, "pt": torch.save}
    for number, (ending, is_trained) in enumerate(product(saves, (False, True)), 1):
        folder = write_adapter(tmp_path / str(number), seed=number, target=target)
        file = folder / "adapter_model.safetensors"
        weights = load_file(file) | {name: own + is_trained}
        file.unlink()
        saves[ending](weights, file.with_suffix(f".{ending}"))
        assert ("embed_tokens.base_layer.weight was trained" in added(manager, folder, number)) == is_trained


@pytest.mark.parametrize("manager", [{"lora_target_modules": ["v_proj"]}], indirect=True)
def test_an_adapter_of_modules_left_out_is_refused(manager: Any, target: Path, tmp_path: Path) -> None:
    """Bug: with `--lora-target-modules` an adapter of other modules served the bare target."""
    from outrider_runtime.vllm_plugin.adapter_shapes import check_each

    check_each(manager)
    said = loads(manager, target, tmp_path / "one", 1, unchanged)
    assert "it changes lm_head, which the target does not have, or --lora-target-modules" in said


def test_an_adapter_with_code_in_it_is_refused_with_a_remedy(manager: Any, target: Path, tmp_path: Path) -> None:
    """torch's own sentence advises to run the code."""
    from vllm.lora.request import LoRARequest

    folder = write_adapter(tmp_path / "code", seed=1, target=target)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(pytest.raises))
    with pytest.raises(Exception, match="load failed") as refused:
        manager.add_adapter(LoRARequest("code", 1, str(folder)))
    assert engine_sentence(str(refused.value)).endswith("save them as safetensors")
