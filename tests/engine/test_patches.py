"""Each change of vLLM's code in memory has a test that fails when vLLM behaves otherwise in that place.

Most need an engine, and stand where the behaviour is tested; `HELD_BY` names them. The others are here.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outrider_runtime.vllm_plugin import patches
from outrider_runtime.vllm_plugin.patches import PATCHES, Patch

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
FOLDER = Path(__file__).parent
RUNTIME = FOLDER.parents[1] / "runtime"
HELD_BY: dict[Patch, str] = {
    patches.SPECULATOR: "test_several_neural_drafters.test_proposals_come_from_the_ordered_member",
    patches.HEADS_STATES: "test_several_neural_drafters.test_target_hands_out_the_layers_of_all_heads",
    patches.TARGET_GRAPHS: "test_graphs.test_varlen_attention_replays_one_graph_for_any_lengths",
    patches.GRAPH_LENGTHS[0]: "test_graphs.test_every_batch_has_a_whole_graph_at_every_length",
    patches.GRAPH_LENGTHS[1]: "test_graphs.test_heads_later_passes_have_one_graph_per_draft_length",
    patches.GRAPH_CHOICES[0]: "test_graphs.test_step_without_proposals_uses_plain_decodings_graph",
    patches.GRAPH_CHOICES[1]: "test_graphs.test_uniform_steps_use_one_graph_and_varlen_steps_pieces",
    patches.RANKING[0]: "test_device_ranking.test_device_verifies_the_ordered_number_asynchronously",
    patches.RANKING[1]: "test_device_ranking.test_filler_is_not_verified",
    patches.NEW_MODEL: "test_patches.test_loader_makes_fills_and_finishes_a_model",
    patches.LOADED_MODEL: "test_patches.test_loader_makes_fills_and_finishes_a_model",
    patches.HEAD_LOADER: "test_several_neural_drafters.test_answers_with_each_member_equal_plain",
    patches.DFLASH_LOADER: "test_block_drafts.test_pool_of_five_is_lossless",
    patches.DSPARK_LOADER: "test_block_drafts.test_pool_of_five_is_lossless",
    patches.DRAFT_MODEL_LOADER: "test_windowed_draft_model.test_preempted_or_aborted_requests_do_not_affect_others",
    patches.COMPILED_PARTS: "test_mtp_with_block_drafts.test_dflash2_drafts_share_no_compiled_code",
    patches.LOOKAHEAD: "test_block_drafts.test_no_block_is_written_beyond_the_pages_of_its_request",
    patches.NEW_SLOTS: "test_patches.test_vllm_reserves_slots_for_its_one_drafter",
    patches.SPECULATION_CHECK: "test_patches.test_vllm_alone_refuses_min_p_with_speculation",
    patches.ENGINE_CORE: "test_broken_answers.test_pod_whose_answers_are_all_broken_restarts",
    patches.NEW_BLOCKS: "test_patches.test_block_pool_hands_out_blocks_by_one_method",
    patches.ADAPTER_LOADER: "test_adapter_shapes.test_an_adapter_for_another_model_is_refused",
    patches.PROMPT_LOGPROBS[0]: "test_request_kinds.test_log_probabilities_are_those_of_plain_decoding",
    patches.PROMPT_LOGPROBS[1]: "test_request_kinds.test_log_probabilities_are_those_of_plain_decoding",
    patches.CPU_RUNNER: "test_server_requests.test_a_chat_request_is_answered_with_the_plugin_active",
    patches.INPUT_PROCESSOR: "test_server_requests.test_what_clients_send_is_served",
    patches.ENGINE_CONFIG: "test_takeover.test_default_flags_get_the_lookup",
    patches.ENGINE_CLIENT: "test_takeover.test_engine_that_does_not_start_is_vllms_own",
    patches.SERVER_APP: "test_stock_server.test_stock_server_has_outriders_pages_and_metrics",
    patches.MIDDLEWARES: "test_server_stops.test_root_path_serves_the_api_below_it",
}
"""Module of this folder, and test in it."""


def _tests_of(module: str) -> set[str]:
    tree = ast.parse(FOLDER.joinpath(f"{module}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_patch_has_a_test_of_its_behaviour() -> None:
    assert HELD_BY.keys() == set(PATCHES)
    for held_by in HELD_BY.values():
        module, test = held_by.split(".")
        assert test in _tests_of(module)


def test_nothing_of_vllm_is_replaced_elsewhere() -> None:
    """`unittest.mock` is for tests; the CPU's stand-ins have a table of their own."""
    for file in RUNTIME.rglob("*.py"):
        assert "unittest" not in file.read_text(), file


def test_patch_ends_with_its_context() -> None:
    with patches.in_place(patches.NEW_MODEL, "ours"):
        assert patches.original(patches.NEW_MODEL) == "ours"
    assert callable(patches.original(patches.NEW_MODEL))
    with pytest.raises(AttributeError), patches.in_place(Patch("vllm.config", "no_such_name", ""), "ours"):
        pass


def test_loader_makes_fills_and_finishes_a_model() -> None:
    """Weights are marked before they are loaded, and checked before they are repacked."""
    from torch import nn
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    steps: list[str] = []

    class Loader(BaseModelLoader):  # type: ignore[misc]  # vLLM is untyped here
        def download_model(self, *_arguments: Any) -> None:
            raise NotImplementedError

        def load_weights(self, *_arguments: Any) -> None:
            steps.append("loaded")

    def made(**_keywords: Any) -> nn.Module:
        steps.append("made")
        return nn.Identity()

    load_config, device = SimpleNamespace(device="cpu"), SimpleNamespace(device="cpu")
    config = SimpleNamespace(load_config=load_config, device_config=device, quant_config=None)
    with (
        patches.in_place(patches.NEW_MODEL, made),
        patches.in_place(patches.LOADED_MODEL, lambda *_arguments: steps.append("finished")),
    ):
        Loader(load_config).load_model(config, SimpleNamespace(dtype=_float32(), quantization=None))
    assert steps == ["made", "loaded", "finished"]


def _float32() -> Any:
    import torch

    return torch.float32


def test_vllm_alone_refuses_min_p_with_speculation() -> None:
    """What the patch takes away is there: without it such a request is refused."""
    import subprocess
    import sys

    code = (
        "from vllm.sampling_params import SamplingParams as P\n"
        "from types import SimpleNamespace as N\n"
        "try: P(min_p=0.1)._validate_spec_decode(N())\n"
        "except Exception as error: print('refused', error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "refused" in done.stdout


@pytest.mark.parametrize(("method", "slots"), [("eagle3", {0}), ("mtp", {0}), ("draft_model", {1}), ("dspark", {0, 6})])
def test_vllm_reserves_slots_for_its_one_drafter(method: str, slots: set[int]) -> None:
    """A step's token budget lacks so many for each request, whatever else the pool holds. DSpark's block: 0 on 0.33."""
    from vllm.config import SpeculativeConfig

    config = SpeculativeConfig.__new__(SpeculativeConfig)
    vars(config).update(method=method, num_speculative_tokens=7, parallel_drafting=method == "dspark")
    assert config.max_num_new_slots_for_drafting in slots


def test_block_pool_hands_out_blocks_by_one_method() -> None:
    """Each block has its number, and page 0 belongs to no request."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=4, enable_caching=False, hash_block_size=16)
    blocks = pool.get_new_blocks(2)
    patches.put(patches.NEW_BLOCKS, lambda _count: "ours", of=pool)
    assert [block.block_id for block in blocks] == [1, 2]
    assert (pool.get_new_blocks(1), pool.null_block.block_id) == ("ours", 0)
