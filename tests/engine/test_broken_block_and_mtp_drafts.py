"""Block and MTP drafts that look right and lack weights: each is left out by name, and the rest of the pool serves.

Real vLLM in this process, small targets with planted weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine import planted_models
from tests.engine.engines import SMALL, block, lookup, mtp
from tests.engine.ordered import ordered
from tests.engine.test_block_drafts import PROMPTS, everything, idle

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]


def without(draft: Path, weight: str) -> Path:
    """The draft, with a weight taken out of its checkpoint."""
    weights = load_file(draft / "model.safetensors")
    weights.pop(weight)
    save_file(weights, draft / "model.safetensors")
    return draft


def test_block_drafts_that_lack_weights_leave_the_others(tmp_path: Path) -> None:
    lacking: dict[str, tuple[Callable[[Path], Path], str, str]] = {
        "keys": (planted_models.dflash, "layers.1.self_attn.k_proj.weight", "layers.1.self_attn.qkv_proj.weight"),
        "reader": (planted_models.dflash, "fc.weight", "fc.weight"),
        "markov": (
            lambda folder: planted_models.dspark(folder, {}),
            "markov_head.markov_w2.weight",
            "markov_w2.weight",
        ),
        "selector": (planted_models.dflash2, "candidate_selector.successor_codebook", "successor_codebook"),
        "map": (planted_models.in_speculators_format, "d2t", "draft_id_to_target_id"),
    }
    broken = [block(without(make(tmp_path / name), gone), name) for name, (make, gone, _) in lacking.items()]
    pool = [*broken, lookup(), block(planted_models.dflash(tmp_path / "good"), "good")]
    with ordered(pool, target=SMALL) as engine:
        assert engine.failures.keys() == lacking.keys()
        for name, (_, _, weight) in lacking.items():
            assert f"{weight}" in engine.failures[name], engine.failures[name]
            assert "lacks weights of" in engine.failures[name]
        reference = engine.run(PROMPTS, idle)
        assert engine.run(PROMPTS, everything) == reference
        assert engine.proposed(len(pool) - 1)


def test_mtp_of_an_8_bit_target_is_loaded_in_full(tmp_path: Path) -> None:
    """The config names the layers that are stored in full as vLLM does: the member keeps vLLM's names for that."""
    target = planted_models.in_8_bits(
        tmp_path / "int8", planted_models.mimo(tmp_path / "mimo"), [r"re:.*layers\.6\..*"]
    )
    with ordered([lookup(), mtp()], target=target) as engine:
        assert not engine.failures
        reference = engine.run(PROMPTS, idle)
        assert engine.run(PROMPTS, everything) == reference
        assert engine.proposed(1)


def test_mtp_of_an_8_bit_target_with_other_names_is_left_out(tmp_path: Path) -> None:
    """Its layers would be read as 8 bits with scales that no checkpoint holds."""
    target = planted_models.in_8_bits(tmp_path / "int8", planted_models.mimo(tmp_path / "mimo"), ["re:.*mtp_layers.*"])
    with ordered([lookup(), mtp()], target=target) as engine:
        assert set(engine.failures) == {"mtp"}
        assert "weight_scale" in engine.failures["mtp"]
        reference = engine.run(PROMPTS, idle)
        assert engine.run(PROMPTS, everything) == reference
        assert engine.proposed(0)
