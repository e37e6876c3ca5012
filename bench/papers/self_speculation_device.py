"""Sparse self-speculation on the device at hand: the time of verification and drafting relative to plain decoding.

    python -m bench.papers.self_speculation_device [--context N] [--batch N] [--draft-tokens K] [--target FOLDER]

writes results/self_speculation_device.json. As it stands it is for a GPU of 140 GiB: Llama-3.1-8B's shapes, 24 requests
of 32,000 tokens, 3 drafted tokens, a budget of 512. Weights and prompts are random: the time of a step depends on
neither. The engine is the one that serves (vLLM with the plugin); the profiler drives it and reads its clocks. The
results are T_V/T_T and T_D/T_T of MagicDec's equation 3, and the speed-up at the acceptance that the paper measured
with this budget. A GPU of 80 GiB holds 14 requests. `--cpu` is for a trial without a GPU, with `--target` and small
shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from outrider_crds.draft_pool import DrafterSpec, DraftMethod, SparseSelf
from outrider_crds.model_sources import HostPathSource, ModelRef, ModelSource
from outrider_crds.runtime_config import BootConfig, HotConfig
from outrider_crds.spec import Accelerator, Backend, DraftPrefillMode, Dtype, Engine, SpeculationMode
from outrider_runtime.paths import Paths
from outrider_runtime.profiler.driver import Driver
from outrider_runtime.profiler.engines import ENGINES
from outrider_runtime.profiler.grid import HEADROOM_TOKENS, GridPoint
from outrider_runtime.profiler.host_protocol import VisitOrder

RESULTS = Path(__file__).parent / "results" / "self_speculation_device.json"
NAME = "self"
SINK_TOKENS, BUDGET_TOKENS = 16, 512
ACCEPTANCE = 0.808
"""Acceptance rate of each proposal: 2.46 tokens a step with two drafted ones (MagicDec, Table
1(c), 32,000 tokens, 32 requests, budget 512)."""
STEPS, VISITS = 5, 3
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
    "tie_word_embeddings": False,
}  # fmt: skip


def shapes_of_llama(folder: Path) -> Path:
    """Make a model folder that has only a config."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def boot_config(target: Path, options: argparse.Namespace) -> BootConfig:
    longest = options.context + 2 * HEADROOM_TOKENS
    block = SparseSelf(sink_tokens=SINK_TOKENS, window_tokens=min(options.context, BUDGET_TOKENS - SINK_TOKENS))
    arguments = ["--load-format=dummy", "--skip-tokenizer-init", f"--max-num-seqs={options.batch}"]
    arguments += ["--enforce-eager"] if options.cpu else []
    return BootConfig(
        service="device",
        namespace="default",
        revision="local",
        target=ModelRef(name="target", source=ModelSource(host_path=HostPathSource(path=str(target)))),
        draft_pool=[DrafterSpec(name=NAME, method=DraftMethod.SPARSE_SELF, sparse_self=block)],
        accelerator=Accelerator(products=["cpu" if options.cpu else "gpu"]),
        engine=Engine(dtype=Dtype.AUTO, max_model_len=longest, extra_args=arguments),
        max_draft_tokens=options.draft_tokens,
    )


def start_engine(boot: BootConfig, folder: str) -> Any:
    hot = HotConfig(
        mode=SpeculationMode.CLOSED_LOOP, draft_prefill=DraftPrefillMode.AUTO, max_draft_tokens=boot.max_draft_tokens
    )
    paths = Paths(hot_file=f"{folder}/hot.json", profiles_dir=folder, podinfo_dir=folder, run_dir=folder, mounted=False)
    launch = ENGINES[Backend.VLLM].plan(boot, hot, paths)
    if launch.pool.dropped:
        raise SystemExit(f"the engine does not host the drafter: {launch.pool.dropped[NAME]}")
    launch.prepare(os.environ)
    return ENGINES[Backend.VLLM].start()


def measure_ms(driver: Driver, options: argparse.Namespace) -> dict[str, float]:
    """Measure a plain step, a step that verifies, and a draft pass, in ms; each is the fastest of several visits."""

    def fastest(verify: int) -> tuple[float, float]:
        ask = VisitOrder(GridPoint(options.context, options.batch, verify), NAME if verify else None, STEPS, STEPS)
        samples = [sample for _ in range(VISITS) for sample in driver.visit(ask).samples]
        drafts = [sum(sample.draft_s.values()) for sample in samples if sample.draft_s]
        return 1e3 * min(sample.target_s for sample in samples), 1e3 * min(drafts, default=0.0)

    plain, _ = fastest(0)
    verifying, drafting = fastest(options.draft_tokens)
    return {"plainMs": plain, "verifyMs": verifying, "draftPassMs": drafting / options.draft_tokens}


def speedup(ms: dict[str, float], draft_tokens: int) -> float:
    """Return the speed-up of MagicDec's equation 2: tokens * T_T / (T_V + k * T_D)."""
    tokens = (1 - ACCEPTANCE ** (draft_tokens + 1)) / (1 - ACCEPTANCE)
    return tokens * ms["plainMs"] / (ms["verifyMs"] + draft_tokens * ms["draftPassMs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32_000)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--target", type=Path, help="a model's folder, in place of Llama-3.1-8B's shapes")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = options.target or shapes_of_llama(Path(folder))
        engine = start_engine(boot_config(target, options), tempfile.mkdtemp(prefix="outrider-device-"))
        ms = measure_ms(Driver(engine), options)
        figures = {
            "device": engine.device, "engine": engine.version, "target": options.target and options.target.name,
            "context": options.context, "requests": options.batch, "draftTokens": options.draft_tokens,
            **{name: round(value, 3) for name, value in ms.items()},
            "verifyByPlain": round(ms["verifyMs"] / ms["plainMs"], 3),
            "draftByPlain": round(ms["draftPassMs"] / ms["plainMs"], 3),
            "acceptance": ACCEPTANCE, "speedup": round(speedup(ms, options.draft_tokens), 3),
        }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if not options.cpu:
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
