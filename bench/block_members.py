"""What a block drafter costs in steps in which it proposes nothing: idle (loaded, not run) and fed (context KV).

    python -m bench.block_members [--rounds N]

writes results/block_members.json. Two figures; the bars are 1% and 2% of a plain step:

measured    on this machine: SmolLM2-135M with and without a DFlash draft of five layers in the pool (planted weights).
            Each engine is a process with one thread; all are up at one time and take turns in changing order. CPU time
            a token, one value a round; ratios are taken within a round. "alone" runs twice: its ratio is the noise.
profiled    feeding / plain step, from the profile that the controller mounts in each composed world of an 8B target
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
from outrider_runtime.control.cost.model import Shape
from outrider_runtime.control.data.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter
from outrider_runtime.simulate.replay.fitted_profile import fitted
from outrider_runtime.simulate.worlds import world as worlds
from outrider_runtime.simulate.worlds.world import BlockPass, Passes

from bench.real_cores import TOKENS, Engine, answer, engines_up, prepare_process, prompts

RESULTS = Path(__file__).parent / "results" / "block_members.json"
BATCHES = (1, 8)
ROUNDS = 9
ALONE, AGAIN, POOL = "alone", "alone again", "with a block drafter"
"""Engines."""
IDLE, FED = "idle", "fed"
"""Arms of the engine that hosts the block drafter."""
ARMS = {ALONE: ALONE, AGAIN: AGAIN, IDLE: POOL, FED: POOL}
"""Arm -> the engine that it runs in."""
IDLE_BAR, FED_BAR = 1.01, 1.02
BLOCK = "flash"
LAYERS = 5
"""Layers of published DFlash drafts for 8B targets."""
WORLDS = ("llama-3.1-8b-a100", "llama-3.1-8b-h100", "llama-3.1-8b-h200", "llama-3.1-8b-l40s")
PROFILED_BATCHES = (1, 16, 64, 128)
CONTEXT = 1024


# -- one engine: a process of its own that runs a batch on request ----------------------------------------------------


def serve(name: str) -> None:
    llm = start_engine(name)
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def run(batch: int, arm: str) -> None:
        llm.llm_engine.engine_core.engine_core.scheduler.outrider.pin(0, BLOCK if arm == FED else None)
        llm.generate(prompts(batch), greedy, use_tqdm=False)

    answer(run)


def start_engine(name: str) -> Any:
    from outrider_runtime.vllm_plugin import arguments as of_engine
    from outrider_runtime.vllm_plugin import launch

    from tests.engine import engines

    prepare_process()
    drafters = [engines.lookup()]
    if name == POOL:
        drafters.append(engines.block(planted_draft(Path(tempfile.mkdtemp(prefix="outrider-block-"))), BLOCK))
    plan = engines.make_plan(drafters, extra=[f"--max-num-seqs={max(BATCHES)}"])
    launch.prepare(plan)
    return engines.start(of_engine.engine_arguments(plan))


def planted_draft(folder: Path) -> Path:
    """A DFlash draft for SmolLM2-135M, of random weights: what it costs does not depend on them."""
    from tests.engine import engines, planted_models

    draft = planted_models.dflash(folder / "dflash", layers=LAYERS)
    config = json.loads((draft / "config.json").read_text())
    target = json.loads((engines.TARGET / "config.json").read_text())
    config["num_target_layers"] = target["num_hidden_layers"]
    (draft / "config.json").write_text(json.dumps(config))
    return draft


# -- measured ---------------------------------------------------------------------------------------------------------


def measured(engines: Mapping[str, Engine], rounds: int) -> list[dict[str, Any]]:
    """Return CPU milliseconds a token, one value a round, and ratios within a round, by batch and arm."""
    order, cpu_ms = random.Random(0), {(batch, arm): list[float]() for batch in BATCHES for arm in ARMS}
    for number in range(rounds + 1):
        for batch in BATCHES:
            for arm in order.sample([*ARMS], len(ARMS)):
                value, _ = engines[ARMS[arm]].run(batch, arm)
                if number:  # the first round warms up
                    cpu_ms[batch, arm].append(round(value, 3))
        print(f"round {number} of {rounds}", flush=True)
    return [
        {"requests": batch, "arm": arm, "cpu_ms": values} | _ratio(values, cpu_ms[batch, by])
        for (batch, arm), values in cpu_ms.items()
        for by in [IDLE if arm == FED else ALONE]
        if arm != ALONE
    ]


def _ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    low, middle, high = quantiles([value / other for value, other in zip(values, others, strict=True)], n=4)
    return {"ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


# -- profiled ---------------------------------------------------------------------------------------------------------


def profiled(name: str) -> list[dict[str, Any]]:
    """Feeding / plain step in a composed world, by batch, as its fitted profile has it."""
    world = worlds.load(name)
    head = world.drafters["eagle"]
    assert isinstance(head, Passes)
    block = Drafter(BLOCK, needs_kv=True, needs_hidden=True)
    hosting = replace(world, drafters={BLOCK: BlockPass(head, 1 + LAYERS)})
    model = fitted(hosting, [block], np.random.default_rng(0))
    feeding, step = model.drafters[BLOCK].first_pass, model.target[ExecutionMode.UNIFORM]
    rows = []
    for requests in PROFILED_BATCHES:
        shape = Shape(requests * CONTEXT, requests, requests, requests * CONTEXT / 1000)
        fed_s, plain_s = feeding.seconds(shape), step.seconds(shape)
        rows.append(
            {"world": name, "requests": requests, "fed_us": round(1e6 * fed_s, 1), "plain_us": round(1e6 * plain_s, 1),
             "ratio": round(1 + fed_s / plain_s, 4)}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 2")
    parser.add_argument("--engine", choices=(*ARMS.values(),), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options.engine)
        return
    of_worlds = [row for name in WORLDS for row in profiled(name)]
    with engines_up(dict.fromkeys(ARMS.values()), "block_members") as started:
        rows = measured(started, options.rounds)
    document = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
        "bars": {IDLE: IDLE_BAR, FED: FED_BAR}, "measured": rows, "profiled": of_worlds,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(f"{row['requests']:3} requests  {row['arm']}: {row['ratio']} {row['quartiles']}")
    for row in of_worlds:
        print(f"{row['world']}, {row['requests']:3} requests: fed {row['ratio']}")


if __name__ == "__main__":
    main()
