"""What a block drafter costs in steps in which it proposes nothing: idle (loaded, not run) and fed (context KV).

    python -m bench.block_members [--rounds N]

writes results/block_members.json. Three figures; the bars are 1% and 2% of a plain step:

measured    on this machine: SmolLM2-135M with a lookup and a DFlash draft of five layers (planted weights), one thread.
            Two processes of the same engine differ by more than the bar, so all arms are one engine, which changes from
            step to step: the draft is taken out of the pool (no hidden states, no room for its block), is idle, and is
            taken out once more. Three steps in random order make a group; ratios of CPU time are taken within a group.
            "absent again" is the noise. Fed steps, which cannot stand gaps, are whole answers: they are compared with
            the idle steps of the same round. The loop is held at k = 0, so that its decisions are not part of it.
decided     microseconds of the loop's decisions in a step, for a lookup alone and together with a block drafter that is
            suspended: replays of two loads take turns in one process
profiled    feeding / plain step, from the profile that the controller mounts in each composed world of an 8B target
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from outrider_runtime.control.controller import Controller
from outrider_runtime.control.plans import ExecutionMode
from outrider_runtime.control.settings import Drafter, Settings
from outrider_runtime.control.step_times import Shape
from outrider_runtime.simulate.replay.engine import ReplayEngine
from outrider_runtime.simulate.replay.fitted_profile import fit_profile
from outrider_runtime.simulate.worlds import world as worlds
from outrider_runtime.simulate.worlds.world import BlockPass, Passes

from bench.real_cores import TOKENS, prepare_process, prompts
from bench.replay.pool import load
from bench.replay.settings import BLOCK as BLOCK_TRAIT
from bench.replay.settings import LONGEST, SLOTS, TRAITS, Case, plain_decoding, profile, setting

RESULTS = Path(__file__).parent / "results" / "block_members.json"
BATCHES = (1, 8)
ROUNDS = 20
FED_EVERY_ROUNDS = 4  # its ratio has no bar here, and its steps tell nothing of idle ones
ABSENT, AGAIN, IDLE, FED = "absent", "absent again", "idle", "fed"
ARMS = (ABSENT, AGAIN, IDLE)
"""Arms that change from step to step."""
IDLE_BAR, FED_BAR = 1.01, 1.02
RESAMPLES = 2000
BLOCK = "flash"
DECIDING = (("lookup",), ("lookup", BLOCK_TRAIT))
"""Pools whose decisions are timed."""
LAYERS = 5
"""Layers of published DFlash drafts for 8B targets."""
WORLDS = ("llama-3.1-8b-a100", "llama-3.1-8b-h100", "llama-3.1-8b-h200", "llama-3.1-8b-l40s")
PROFILED_BATCHES = (1, 16, 64, 128)
CONTEXT = 1024


# -- measured: one engine ---------------------------------------------------------------------------------------------


class Toggled:
    """An engine whose block drafter can be taken out, and put back, between two steps."""

    def __init__(self) -> None:
        from outrider_runtime.vllm_plugin import arguments as of_engine
        from outrider_runtime.vllm_plugin import launch

        from tests.engine import engines

        prepare_process()
        draft = planted_draft(Path(tempfile.mkdtemp(prefix="outrider-block-")))
        pool = [engines.lookup(), engines.block(draft, BLOCK)]
        plan = engines.make_plan(pool, extra=[f"--max-num-seqs={max(BATCHES)}", "--no-enable-prefix-caching"])
        launch.prepare(plan)
        self.engine = engines.start(of_engine.engine_arguments(plan)).llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self._members = self.runner.speculator._members
        self._number, self._member = next(reversed(self._members.items()))
        self._layers = self.runner.model.model.aux_hidden_state_layers
        self._lookahead_tokens = self.scheduler.num_lookahead_tokens
        assert self._layers
        assert self._lookahead_tokens

    def host(self, *, block: bool) -> None:
        """Put the block drafter into the worker, the target and the scheduler, or take it out."""
        if block:
            self._members[self._number] = self._member
        else:
            self._members.pop(self._number, None)
        self.runner.model.set_aux_hidden_state_layers(self._layers if block else ())
        self.runner.use_aux_hidden_state_outputs = block
        self.scheduler.num_lookahead_tokens = self._lookahead_tokens if block else 0

    def steps_s(self, batch: int, arms: Iterator[str], drafter: str | None = None) -> list[tuple[str, float]]:
        """Run a batch; returns the arm and the CPU seconds of each step in which all of its requests decode.

        arms: taken one by one, for these steps. drafter: is fed in each step.
        """
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        self.scheduler.outrider.pin(0, drafter)
        for number, prompt in enumerate(prompts(batch)):
            self.engine.add_request(str(number), prompt, greedy)
        self.engine.step()  # reads the prompts
        seconds = list[tuple[str, float]]()
        while self.engine.has_unfinished_requests():
            arm = next(arms)
            self.host(block=arm not in (ABSENT, AGAIN))
            began_s = time.process_time()
            self.engine.step()
            seconds.append((arm, time.process_time() - began_s))
        self.host(block=True)
        return seconds[:-1]  # the last one ends the requests


def planted_draft(folder: Path) -> Path:
    """A DFlash draft for SmolLM2-135M, of random weights: what it costs does not depend on them."""
    from tests.engine import engines, planted_models

    draft = planted_models.dflash(folder / "dflash", layers=LAYERS)
    config = json.loads((draft / "config.json").read_text())
    target = json.loads((engines.TARGET / "config.json").read_text())
    config["num_target_layers"] = target["num_hidden_layers"]
    (draft / "config.json").write_text(json.dumps(config))
    return draft


def groups(rng: random.Random) -> Iterator[str]:
    """Yield each arm once, in random order; again and again."""
    while True:
        yield from rng.sample(ARMS, len(ARMS))


def measure_arms(engine: Toggled, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of CPU time of a step, and ratios within a group, by arm."""
    rng, grouped, fed = random.Random(0), list[dict[str, float]](), list[float]()
    for number in range(rounds + 1):
        changing = engine.steps_s(batch, groups(rng))
        if not number:  # it warms up
            continue
        whole = range(0, len(changing) - len(ARMS) + 1, len(ARMS))
        grouped += [dict(changing[start : start + len(ARMS)]) for start in whole]
        if number % FED_EVERY_ROUNDS == 0:
            in_fed = [seconds for _, seconds in engine.steps_s(batch, itertools.repeat(FED), BLOCK)]
            fed.append(median(in_fed) / median(seconds for arm, seconds in changing if arm == IDLE))
    rows = [
        {"requests": batch, "arm": arm, "cpu_ms": _milliseconds(group[arm] for group in grouped)}
        | _ratio([group[arm] / group[ABSENT] for group in grouped])
        for arm in (AGAIN, IDLE)
    ]
    absent = {"requests": batch, "arm": ABSENT, "cpu_ms": _milliseconds(group[ABSENT] for group in grouped)}
    return [absent, *rows, {"requests": batch, "arm": FED, "by": IDLE} | _ratio(fed)]


def _milliseconds(seconds: Iterator[float]) -> float:
    return round(1e3 * median(seconds), 3)


def _ratio(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median, its 95% interval by bootstrap, and the quartiles of single ratios."""
    values = np.array(ratios)
    resampled = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    lower, middle, upper = quantiles(ratios, n=4)
    return {
        "ratio": round(middle, 4), "interval": [round(float(low), 4), round(float(high), 4)],
        "quartiles": [round(lower, 4), round(upper, 4)], "count": len(ratios),
    }  # fmt: skip


# -- decided ----------------------------------------------------------------------------------------------------------


def time_decisions(rounds: int) -> list[dict[str, Any]]:
    """Return microseconds of thread CPU time of the loop's decisions in a step, with and without an idle drafter."""
    rows = []
    for requests in BATCHES:
        decision_us = {pool: list[float]() for pool in DECIDING}
        for seed in range(rounds + 1):
            for pool in DECIDING:
                case = Case(WORLDS[2], drafters=pool)
                policy = Controller(
                    Settings(tuple(TRAITS[name] for name in pool), LONGEST, SLOTS, scores_placeholders=True),
                    profile(case.world, tuple(TRAITS[name] for name in pool), 0),
                    clock=time.thread_time, rng=np.random.default_rng(seed),
                )  # fmt: skip
                if BLOCK_TRAIT in pool:
                    policy.suspend(BLOCK_TRAIT, "it is to be idle")
                engine = ReplayEngine(setting(case, plain_decoding()), load(case, requests, seed), policy)
                engine.run()
                if seed:  # the first round compiles
                    decision_us[pool].append(1e6 * policy.state().decision_s / len(engine.log.step_s))
        alone, hosting = (median(decision_us[pool]) for pool in DECIDING)
        rows.append({"requests": requests, "alone_us": round(alone, 1), "hosting_us": round(hosting, 1)})
    return rows


# -- profiled ---------------------------------------------------------------------------------------------------------


def predict_feeding(name: str) -> list[dict[str, Any]]:
    """Return the ratio (feeding + plain step) / plain step in a composed world, by batch, from its fitted profile."""
    world = worlds.load(name)
    head = world.drafters["eagle"]
    assert isinstance(head, Passes)
    block = Drafter(BLOCK, needs_kv=True, needs_hidden=True)
    hosting = replace(world, drafters={BLOCK: BlockPass(head, 1 + LAYERS)})
    model = fit_profile(hosting, [block], np.random.default_rng(0))
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
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 8")
    options = parser.parse_args()
    of_worlds = [row for name in WORLDS for row in predict_feeding(name)]
    decisions = time_decisions(3)
    engine = Toggled()
    rows = [row for batch in BATCHES for row in measure_arms(engine, batch, options.rounds)]
    document = {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
        "bars": {IDLE: IDLE_BAR, FED: FED_BAR}, "measured": rows, "decided": decisions, "profiled": of_worlds,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    for row in (*rows, *decisions):
        print(row)
    for row in of_worlds:
        print(f"{row['world']}, {row['requests']:3} requests: fed {row['ratio']}")


if __name__ == "__main__":
    main()
