"""Sparse self-speculation on real cores: what a token costs over contexts of 1,000 to 7,500 tokens, with and without.

    python -m tests.benchmarks.long_contexts [--lengths K ...] [--rounds N] [--tokens N] [--minutes M]

writes results/long_contexts.json, and results/long_contexts.png where matplotlib is installed. One engine (vLLM with
the loop, SmolLM2, float32, one thread) runs all: plain decoding, fixed draft lengths with a window of 512 tokens, and
the closed loop, at each context and batch; then windows of 64 to 1,024 tokens at one of them. They take turns, so that
a noisy machine is noisy for all. The engine's clocks count the process's CPU time, so that other processes lengthen no
step. CPU time is raw, one value a round; ratios are taken within a round. The texts are the topics of Python's own
help.

What is predicted: a speed-up from step times that were fitted to all other cells (what a step costs is the profile's
form), and from the tokens a step that were measured. So an error is the latency model's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pydoc_data.topics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

RESULTS = Path(__file__).parent / "results" / "long_contexts.json"
CONTEXTS = (1000, 2000, 4000, 7500)
BATCHES = (1, 4, 8)
WINDOWS = (64, 128, 256, 512, 1024)
WINDOW = 512
LENGTHS = (1, 2, 3)
SWEEP = (4000, 4, 2)
"""Context, batch and draft length of the window sweep."""
PAGE = 32
LEAST_CELLS = 4
"""Of which a step's cost can be fitted to the others."""
OWN_TOKENS = 200
"""Of each prompt, that no other one ends with."""
PLAIN, LOOP = "plain", "closed loop"
ROUNDS, TOKENS, WARM_UP_TOKENS = 2, 10, 2


@dataclass(frozen=True)
class Arm:
    name: str
    draft_tokens: int | None = 0
    """None: the closed loop."""
    window: int = WINDOW


@dataclass
class Seen:
    """One arm in one cell."""

    context: int
    batch: int
    arm: str
    window: int
    draft_tokens: int | None
    cpu_ms: list[float] = field(default_factory=list)
    """A token, one value a round."""
    tokens_per_step: list[float] = field(default_factory=list)
    """Of a request."""
    target_ms: list[float] = field(default_factory=list)
    """Of a step, without the first two."""
    draft_ms: list[float] = field(default_factory=list)
    tried: list[int] = field(default_factory=lambda: [0] * max(LENGTHS))
    accepted: list[int] = field(default_factory=lambda: [0] * max(LENGTHS))
    """By position."""


class LongContexts:
    """The engine, and prompts of which the longer ones begin as the shorter do: the prefix cache reads them once."""

    def __init__(self, bench: Any) -> None:
        self._bench, self._loop = bench, bench.loop
        text = "\n".join(pydoc_data.topics.topics.values())
        self._text: list[int] = bench.llm.get_tokenizer().encode(text)[: 2 * max(CONTEXTS) + 40 * OWN_TOKENS]
        self._serial = 0

    def prompt(self, context: int, number: int) -> list[int]:
        """Two documents, and the end of each prompt from a place of its own."""
        start = (number % 2) * max(CONTEXTS)
        own = 2 * max(CONTEXTS) + number * OWN_TOKENS
        return [*self._text[start : start + context - OWN_TOKENS], *self._text[own : own + OWN_TOKENS]]

    def run(self, seen: Seen, tokens: int) -> None:
        """So many tokens a request, after two steps in which all decode."""
        if seen.draft_tokens is None:
            self._loop.pin(None)
        else:
            self._loop.pin(seen.draft_tokens, f"w{seen.window}" if seen.draft_tokens else None)
        names = [self._add(self.prompt(seen.context, number)) for number in range(seen.batch)]
        engine, running = self._bench.llm.llm_engine, self._bench.scheduler.running
        while len(running) < seen.batch or any(one.num_output_tokens < 2 for one in running):
            engine.step()
            running = self._bench.scheduler.running
        self._bench.steps.clear()
        before, steps, cpu_s = self._emitted(), 0, time.process_time()
        while self._emitted() - before < tokens * seen.batch:
            engine.step()
            steps += 1
        cpu_s, emitted = time.process_time() - cpu_s, self._emitted() - before
        seen.cpu_ms.append(round(1000 * cpu_s / emitted, 3))
        seen.tokens_per_step.append(round(emitted / steps / seen.batch, 3))
        self._note(seen)
        engine.abort_request(names)
        engine.step()

    def _note(self, seen: Seen) -> None:
        for told in self._bench.steps:
            outcome = told.outcome
            seen.target_ms.append(1000 * outcome.target_s)
            seen.draft_ms.append(1000 * float(np.nansum(outcome.draft_s)))
            for depth in outcome.forest.depth[outcome.verified].tolist():
                seen.tried[depth - 1] += 1
            for depth in outcome.forest.depth[outcome.accepted].tolist():
                seen.accepted[depth - 1] += 1

    def _emitted(self) -> int:
        return sum(request.num_output_tokens for request in self._bench.scheduler.running)

    def _add(self, tokens: list[int]) -> str:
        from vllm import SamplingParams

        self._serial += 1
        greedy = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
        name = f"request-{self._serial}"
        self._bench.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, greedy)
        return name


def cells(lengths: Sequence[int]) -> Iterator[list[Seen]]:
    """Those that take turns."""
    arms = [Arm(PLAIN), *(Arm(f"k = {k}", k) for k in lengths), Arm(LOOP, None)]
    context, batch, length = SWEEP
    windows = [Arm(PLAIN), *(Arm(f"window {window}", length, window) for window in WINDOWS)]
    every = [(tokens, requests, arms) for tokens in CONTEXTS for requests in BATCHES]
    for tokens, requests, here in [*every[:6], (context, batch, windows), *every[6:]]:
        yield [Seen(tokens, requests, arm.name, arm.window, arm.draft_tokens) for arm in here]


def measure(lengths: Sequence[int], rounds: int, tokens: int, minutes: float) -> None:
    """Ends with the cell that is under way when the minutes are over."""
    from tests.engine import engines

    os.environ.update(
        OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="2", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    extra = ["--max-model-len=8192", f"--block-size={PAGE}", "--max-num-batched-tokens=2048", "--max-num-seqs=8"]
    pool = [engines.sparse_self(window, f"w{window}") for window in WINDOWS]
    hot = engines.hot_config(max_draft_tokens=max(LENGTHS)).model_copy(update={"slo_classes": []})
    ends = time.monotonic() + 60 * minutes
    made, done = list(cells(lengths)), list[list[Seen]]()
    with engines.bench(pool, hot=hot, extra=extra) as bench, cpu_time(bench):
        for window in WINDOWS:
            if window != WINDOW:
                bench.loop._controller.suspend(f"w{window}", "the loop chooses among k alone")
        long = LongContexts(bench)
        for cell in made:
            if time.monotonic() > ends:
                break
            for number in range(rounds + 1):
                for seen in cell:
                    usable = f"w{seen.window}"
                    bench.loop._controller.resume(usable)
                    long.run(seen if number else Seen(**asdict(seen)), tokens if number else WARM_UP_TOKENS)
                    if seen.window != WINDOW:
                        bench.loop._controller.suspend(usable, "the loop chooses among k alone")
            print(line(cell), flush=True)
            done.append(cell)
            keep(document(done))


@contextmanager
def cpu_time(bench: Any) -> Iterator[None]:
    """Scheduler and worker measure steps by it."""
    from outrider_runtime.step_clock import HostClock

    class CPUTime(HostClock):
        def mark(self) -> float:
            return time.process_time()

    bench.runner._clock = CPUTime()
    clock = SimpleNamespace(monotonic=time.process_time, time=time.time)
    with mock.patch("outrider_runtime.vllm_plugin.scheduler.time", clock):
        yield


def line(cell: Sequence[Seen]) -> str:
    speedups = "  ".join(f"{one.arm}: {speedup(one, cell[0]):.2f}" for one in cell[1:])
    return f"{cell[0].context:5} tokens x {cell[0].batch}: {median(cell[0].cpu_ms):7.1f} ms a token; {speedups}"


def speedup(one: Seen, plain: Seen) -> float:
    return median(two / mine for mine, two in zip(one.cpu_ms, plain.cpu_ms, strict=True))


# -- what the latency model says ------------------------------------------------------------------------------------


def predictions(made: Sequence[Sequence[Seen]]) -> list[dict[str, Any]]:
    """Of each fixed length in each cell: measured and predicted speed-up, the cell itself left out of the fit."""
    found = []
    made = [cell for cell in made if any(one.draft_tokens is None for one in cell)]  # not the window sweep
    for cell in made if len(made) >= LEAST_CELLS else ():
        others = [one for other in made if other is not cell for one in other if one.draft_tokens is not None]
        target, drafts = _fitted(others)
        plain = cell[0]
        for one in cell:
            if one.draft_tokens:
                step_ms = target(one.context, one.batch, one.draft_tokens) + one.draft_tokens * drafts(one)
                predicted = median(one.tokens_per_step) * target(one.context, one.batch, 0) / step_ms
                found.append(
                    {"context": one.context, "batch": one.batch, "draftTokens": one.draft_tokens,
                     "measured": round(speedup(one, plain), 3), "predicted": round(predicted, 3)}
                )  # fmt: skip
    return found


def _fitted(seen: Sequence[Seen]) -> tuple[Any, Any]:
    """Milliseconds of a target's step by context, batch and verified tokens of a request; of a draft pass."""
    from outrider_runtime.control.fit import Sample, fit

    def shape(context: float, batch: int, verified: int) -> Any:
        from outrider_runtime.control.cost import Shape

        tokens = batch * (1 + verified)
        return Shape(context * batch, float(tokens), float(batch), context * tokens / 1000)

    target = fit([Sample(shape(one.context, one.batch, one.draft_tokens or 0), median(one.target_ms)) for one in seen])
    drafted = [one for one in seen if one.draft_tokens]
    passes = fit(
        [
            Sample(shape(_read(one), one.batch, 0), median(one.draft_ms) / one.draft_tokens)
            for one in drafted
            if one.draft_tokens
        ]
    )
    return (
        lambda context, batch, verified: target.cost.seconds(shape(context, batch, verified)),
        lambda one: passes.cost.seconds(shape(_read(one), one.batch, 0)),
    )


def _read(one: Seen) -> float:
    from outrider_runtime.drafters import traits

    from tests.engine.engines import sparse_self

    return float(min(one.context, traits(sparse_self(one.window), PAGE).kv_budget or 0))


def document(made: Sequence[Sequence[Seen]]) -> dict[str, Any]:
    rows = []
    for cell in made:
        for one in cell:
            rows.append(
                {**asdict(one), "target_ms": round(median(one.target_ms), 3),
                 "draft_ms": round(median(one.draft_ms), 3),
                 "speedup": round(speedup(one, cell[0]), 3)}
            )  # fmt: skip
    predicted = predictions(made)
    errors = [abs(one["predicted"] / one["measured"] - 1) for one in predicted]
    clear = [one for one in predicted if abs(one["measured"] - 1) > 0.05]
    return {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
        "medianErrorPercent": round(100 * median(errors), 1) if errors else None,
        "rightSideOfOne": [sum((one["measured"] > 1) == (one["predicted"] > 1) for one in clear), len(clear)],
        "predicted": predicted, "cells": rows,
    }  # fmt: skip


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for batch in BATCHES:
        for arm, style in ((f"k = {LENGTHS[1]}", "-"), (LOOP, "--")):
            here = [row for row in rows if row["batch"] == batch and row["arm"] == arm]
            here.sort(key=lambda row: int(row["context"]))
            left.plot(
                [row["context"] for row in here], [row["speedup"] for row in here], style, marker="o",
                label=f"{batch} requests, {arm}",
            )  # fmt: skip
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(title=f"window {WINDOW}", xlabel="context (tokens)", ylabel="speed-up, CPU seconds a token")
    left.legend(fontsize=8)
    sweep = [row for row in rows if row["arm"].startswith("window")]
    rates = [row["accepted"][0] / max(1, row["tried"][0]) for row in sweep]
    windows = [row["window"] for row in sweep]
    right.plot(windows, [row["speedup"] for row in sweep], marker="o", label="speed-up")
    right.plot(windows, rates, marker="s", label="first proposals accepted")
    context, batch, length = SWEEP
    right.set(title=f"{batch} requests of {context} tokens, k = {length}", xlabel="window (tokens)", xscale="log")
    right.set_xticks(windows, [str(window) for window in windows])
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a request in a round")
    parser.add_argument("--minutes", type=float, default=120.0)
    options = parser.parse_args()
    measure(options.lengths, options.rounds, options.tokens, options.minutes)


def keep(found: dict[str, Any]) -> None:
    """After each cell: a run that is ended early leaves what it has."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    plot(found["cells"], RESULTS.with_suffix(".png"))
    right, clear = found["rightSideOfOne"]
    print(
        f"predicted against measured: median error {found['medianErrorPercent']}%, {right} of {clear} on the right side"
    )


if __name__ == "__main__":
    main()
