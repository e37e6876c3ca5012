"""What a token costs on real cores: the bundled engine, `generate` of transformers, and stock vLLM.

    python -m bench.torch_backend [--rounds N]

writes results/torch_backend.json. SmolLM2-135M in float32, one thread per engine, greedy answers of 48 tokens, prompts
of `real_cores`. As there, all engines are up at one time and take turns in changing order. Ours hosts prompt lookup and
the EAGLE-3 head, left to itself and pinned to plain decoding; `generate` runs plain, assisted by the target's first
layers, and with prompt lookup.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import real_cores
from bench.real_cores import TOKENS, Engine, Seen, engines_up, prompts, write

RESULTS = Path(__file__).parent / "results" / "torch_backend.json"
ROUNDS = 7
TRANSFORMERS: dict[str, dict[str, int]] = {
    "generate": {}, "generate, assisted": {}, "generate, lookup": {"prompt_lookup_num_tokens": 3},
}  # fmt: skip
OURS, PLAIN, VLLM = "ours", "ours, k = 0", real_cores.STOCK
ENGINES = {OURS: (OURS, PLAIN), "generate": tuple(TRANSFORMERS), VLLM: (VLLM,)}
"""Engine -> its arms."""
BATCHES = {OURS: (1, 16), "generate": (1,), VLLM: (1, 16)}
COMPARED = (
    *((1, OURS, other) for other in TRANSFORMERS), (1, PLAIN, "generate"), (1, PLAIN, VLLM), (16, PLAIN, VLLM),
    (1, OURS, VLLM), (16, OURS, VLLM),
)  # fmt: skip


def serve(engine: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded
    if engine == VLLM:
        real_cores.serve(VLLM)
    else:
        real_cores.answer(_load_bundled_engine() if engine == OURS else _load_transformers())


def _load_bundled_engine() -> Callable[[int, str], None]:
    from outrider_runtime.paths import Paths
    from outrider_runtime.torch_engine.engine_loading import load
    from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops

    from tests.engine import engines

    boot = engines.boot_config([engines.lookup(), engines.eagle()])
    options = ["--max-num-seqs=16", "--max-num-batched-tokens=512", "--kv-cache-memory-bytes=1073741824"]
    settings = boot.engine.model_copy(update={"extra_args": options})
    places = dict.fromkeys(("hot_file", "profiles_dir", "podinfo_dir", "run_dir"), tempfile.mkdtemp())
    loaded = load(boot.model_copy(update={"engine": settings}), engines.hot_config(), Paths(mounted=False, **places))
    serial = itertools.count()

    def run(batch: int, arm: str) -> None:
        loaded.loop.pin(0 if arm == PLAIN else None)
        for text in prompts(batch):
            tokens = loaded.text.encode(text)
            greedy = Sampling(temperature=0.0)
            request = Request(
                f"r{next(serial)}", tokens, len(tokens), Stops(TOKENS), greedy, loaded.text.detokenizer(tokens)
            )
            loaded.engine.add(request, time.time())
        while loaded.engine.has_work:
            loaded.engine.step()

    return run


def _load_transformers() -> Callable[[int, str], None]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.engine import engines

    tokenizer = AutoTokenizer.from_pretrained(engines.TARGET)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (engines.TARGET, engines.POOR_DRAFT)
    )

    def run(_batch: int, arm: str) -> None:
        (text,) = prompts(1)
        ids = tokenizer(text, return_tensors="pt").input_ids
        more = {"assistant_model": draft} if arm == "generate, assisted" else TRANSFORMERS[arm]
        target.generate(ids, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS, **more)

    return run


def measure(engines: Mapping[str, Engine], rounds: int) -> list[Seen]:
    order = random.Random(0)
    turns = [(name, arm, batch) for name, arms in ENGINES.items() for arm in arms for batch in BATCHES[name]]
    seen = {(arm, batch): Seen(arm, batch, [], []) for _, arm, batch in turns}
    for number in range(rounds + 1):
        for name, arm, batch in order.sample(turns, len(turns)):
            cpu_ms, wall_ms = engines[name].run(batch, arm)
            if number:  # the first round warms up
                seen[arm, batch].cpu_ms.append(round(cpu_ms, 3))
                seen[arm, batch].wall_ms.append(round(wall_ms, 3))
        print(f"round {number} of {rounds}", flush=True)
    return list(seen.values())


def compare(seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """Return the ratios of CPU time per token, ours / other: median and quartiles over the rounds."""
    figures, ratios = {(row.arm, row.batch): row.cpu_ms for row in seen}, []
    for batch, mine, other in COMPARED:
        pairs = zip(figures[mine, batch], figures[other, batch], strict=True)
        low, middle, high = quantiles([ours_ms / other_ms for ours_ms, other_ms in pairs], n=4)
        ratios.append(
            {"batch": batch, "of": mine, "by": other, "ratio": round(middle, 3),
             "quartiles": [round(low, 3), round(high, 3)]}
        )  # fmt: skip
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 2")
    parser.add_argument("--engine", choices=tuple(ENGINES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options.engine)
        return
    with engines_up(ENGINES, "torch_backend") as started:
        seen = measure(started, options.rounds)
    ratios = compare(seen)
    write(RESULTS, seen, ratios)
    for row in seen:
        print(f"{row.batch:2} requests  {row.arm}: {median(row.cpu_ms):.1f} ms of CPU per token")
    for ratio in ratios:
        print(f"{ratio['batch']:2} requests  {ratio['of']} / {ratio['by']}: {ratio['ratio']} {ratio['quartiles']}")


if __name__ == "__main__":
    main()
