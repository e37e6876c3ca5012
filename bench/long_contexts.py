"""Sparse self-speculation on real cores: what a token costs over contexts of 1,000 to 7,500 tokens, with and without.

    python -m bench.long_contexts [--lengths K ...] [--rounds N] [--tokens N] [--minutes M] [--resume]

writes results/long_contexts.json, and docs/images/long_contexts.png (with matplotlib). One engine (vLLM with
the loop, SmolLM2, float32, one thread) runs all: plain decoding, fixed draft lengths with a window of 512 tokens, and
the closed loop, at each context and batch; then, at one of them, windows of 64 to 1,024 tokens, and windows of 512 with
other sinks. Sinks are whole pages of 32 tokens, so 4, 16 and 32 are the same. The arms take turns, so that noise of
the machine meets all of them. The engine's clocks count the process's CPU time, which other processes do not lengthen.
CPU time is raw, one value per round; ratios are taken within a round. The texts are the topics of Python's own help.

Before the cells the profiler measures that engine, as it does for a service, but in CPU time, uncorrected, and over the
benchmark's own documents, which the prefix cache holds. The loop decides by this profile. A predicted speed-up is made
from the profile and the measured tokens per step, so its error is the latency model's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pydoc_data.topics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

RESULTS = Path(__file__).parent / "results" / "long_contexts.json"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "long_contexts.png"
CONTEXTS = (7500, 4000, 2000, 1000)
"""The longest first, so that a run that is stopped early has them."""
BATCHES = (1, 4, 8)
WINDOWS = (64, 128, 256, 512, 1024)
WINDOW = 512
LENGTHS = (1, 2, 3)
SWEEP = (4000, 4, 2)
"""Context, batch and draft length of both sweeps."""
SINKS = (0, 16, 64, 128)
"""Windows of no page, one, two and four pages."""
SINK_TOKENS = 16
PAGE, LONGEST = 32, 8192
DOCUMENTS = 4
GROWTH = 256
"""Tokens that a document leaves to its answer."""
PLAIN, LOOP = "plain", "closed loop"
ROUNDS, TOKENS, WARM_UP_TOKENS = 3, 8, 2
PROFILE_MINUTES = 4.0


@dataclass(frozen=True)
class Arm:
    name: str
    draft_tokens: int | None = 0
    """None: the closed loop."""
    window: int = WINDOW
    sinks: int = SINK_TOKENS


@dataclass
class Seen:
    """One arm in one cell."""

    context: int
    batch: int
    arm: str
    window: int
    draft_tokens: int | None
    sinks: int = SINK_TOKENS
    cpu_ms: list[float] = field(default_factory=list)
    """CPU milliseconds per token, one value per round."""
    tokens_per_step: list[float] = field(default_factory=list)
    """Mean tokens of a request per step, by round."""
    target_ms: list[float] = field(default_factory=list)
    """Target pass of a step, without the first two steps."""
    draft_ms: list[float] = field(default_factory=list)
    tried: list[int] = field(default_factory=lambda: [0] * max(LENGTHS))
    accepted: list[int] = field(default_factory=lambda: [0] * max(LENGTHS))
    """Trials and accepted tokens, by position in the proposal."""

    @property
    def drafter(self) -> str:
        return drafter(self.window, self.sinks)


def drafter(window: int, sinks: int = SINK_TOKENS) -> str:
    return f"w{window}" if sinks == SINK_TOKENS else f"w{window}-s{sinks}"


DRAFTER = drafter(WINDOW)


class LongContexts:
    """The engine, and prompts that are beginnings of a few documents, so that each document is prefilled once.

    A document that comes again in a batch is a page shorter. By then a core's cache no longer holds its KV, since other
    documents were read in between.
    """

    def __init__(self, bench: Any) -> None:
        self._bench, self._loop = bench, bench.loop
        text = "\n".join(pydoc_data.topics.topics.values())
        self._text: list[int] = bench.llm.get_tokenizer().encode(text)[: DOCUMENTS * LONGEST]
        self._serial = 0

    def prompt(self, context: int, number: int) -> list[int]:
        again, document = divmod(number, DOCUMENTS)
        return self._text[document * LONGEST :][: context - again * PAGE]

    def read_documents(self) -> None:
        """Put the prompts into the prefix cache."""
        self._loop.pin(0)
        names = [self._add(self.prompt(LONGEST - GROWTH, number)) for number in range(DOCUMENTS)]
        running = self._bench.scheduler.running
        while len(running) < len(names) or any(not request.num_output_tokens for request in running):
            self._bench.llm.llm_engine.step()
            running = self._bench.scheduler.running
        self._bench.llm.llm_engine.abort_request(names)
        self._bench.llm.llm_engine.step()

    def run(self, seen: Seen, tokens: int) -> None:
        """Decode `tokens` per request, counted after each request has two, and add the measurements to `seen`."""
        if seen.draft_tokens is None:
            self._loop.pin(None)
        else:
            self._loop.pin(seen.draft_tokens, seen.drafter if seen.draft_tokens else None)
        names = [self._add(self.prompt(seen.context, number)) for number in range(seen.batch)]
        engine, running = self._bench.llm.llm_engine, self._bench.scheduler.running
        while len(running) < seen.batch or any(request.num_output_tokens < 2 for request in running):
            engine.step()
            running = self._bench.scheduler.running
        self._bench.steps.clear()
        before, steps, cpu_s = self._count_emitted(), 0, time.process_time()
        while self._count_emitted() - before < tokens * seen.batch:
            engine.step()
            steps += 1
        cpu_s, emitted = time.process_time() - cpu_s, self._count_emitted() - before
        seen.cpu_ms.append(round(1000 * cpu_s / emitted, 3))
        seen.tokens_per_step.append(round(emitted / steps / seen.batch, 3))
        self._note(seen)
        engine.abort_request(names)
        engine.step()

    def _note(self, seen: Seen) -> None:
        for step in self._bench.steps:
            outcome = step.outcome
            seen.target_ms.append(1000 * outcome.target_s)
            seen.draft_ms.append(1000 * float(np.nansum(outcome.draft_s)))
            for depth in outcome.forest.depth[outcome.verified].tolist():
                seen.tried[depth - 1] += 1
            for depth in outcome.forest.depth[outcome.accepted].tolist():
                seen.accepted[depth - 1] += 1

    def _count_emitted(self) -> int:
        return sum(request.num_output_tokens for request in self._bench.scheduler.running)

    def _add(self, tokens: list[int]) -> str:
        from vllm import SamplingParams

        self._serial += 1
        greedy = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
        name = f"request-{self._serial}"
        self._bench.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, greedy)
        return name


def cells(lengths: Sequence[int]) -> Iterator[list[Seen]]:
    """Yield groups of arms; the arms of a group take turns in each round."""
    arms = [Arm(PLAIN), *(Arm(f"k = {k}", k) for k in lengths), Arm(LOOP, None)]
    context, batch, length = SWEEP
    windows = [Arm(PLAIN), *(Arm(f"window {window}", length, window) for window in WINDOWS)]
    sinks = [Arm(PLAIN), *(Arm(f"sinks {count}", length, sinks=count) for count in SINKS)]
    every = [(tokens, requests, arms) for tokens in CONTEXTS for requests in BATCHES]
    sweeps = [(context, batch, windows), (context, batch, sinks)]
    for tokens, requests, cell_context in [*every[:6], *sweeps, *every[6:]]:
        yield [Seen(tokens, requests, arm.name, arm.window, arm.draft_tokens, arm.sinks) for arm in cell_context]


def measure(options: argparse.Namespace, before: dict[str, Any]) -> None:
    """Measure cells; the last one is under way when the minutes are over. before: results of an earlier run."""
    from tests.engine import engines

    os.environ.update(
        OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="3", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    extra = [f"--max-model-len={LONGEST}", f"--block-size={PAGE}", "--max-num-batched-tokens=2048", "--max-num-seqs=8"]
    members = dict.fromkeys([*((window, SINK_TOKENS) for window in WINDOWS), *((WINDOW, sinks) for sinks in SINKS)])
    pool = [engines.sparse_self(window, drafter(window, sinks), sinks) for window, sinks in members]
    hot = engines.hot_config(max_draft_tokens=max(LENGTHS)).model_copy(update={"slo_classes": []})
    ends = time.monotonic() + 60 * options.minutes
    with engines.bench(pool, hot=hot, extra=extra) as bench, cpu_time(bench):
        for member in pool:
            if member.name != DRAFTER:
                bench.loop._controller.suspend(member.name, "the loop chooses among k alone")
        long = LongContexts(bench)
        profile = before.get("profile") or measure_profile(long, 60 * options.profile_minutes)
        done = [restore_cell(rows) for rows in before.get("cells", [])]
        keep(document(done, profile))
        bench.loop.replace_latency(latency_model(profile))
        for cell in cells(options.lengths):
            if time.monotonic() > ends:
                break
            if place(cell) not in map(place, done):
                run_cell(bench, long, cell, options.rounds, options.tokens)
                print(line(cell), flush=True)
                done.append(cell)
                keep(document(done, profile))


def place(cell: Sequence[Seen]) -> tuple[int, int, str]:
    return cell[0].context, cell[0].batch, cell[-1].arm


def run_cell(bench: Any, long: LongContexts, cell: Sequence[Seen], rounds: int, tokens: int) -> None:
    for number in range(rounds + 1):
        for seen in cell:
            bench.loop._controller.resume(seen.drafter)
            long.run(seen if number else Seen(**asdict(seen)), tokens if number else WARM_UP_TOKENS)
            if seen.drafter != DRAFTER:
                bench.loop._controller.suspend(seen.drafter, "the loop chooses among k alone")


# -- the profile ----------------------------------------------------------------------------------------------------


def measure_profile(long: LongContexts, budget_s: float) -> dict[str, Any]:
    """Measure the target's steps and the drafter's passes with the profiler. Prompts cost no budget: they are in the
    prefix cache."""
    from outrider_runtime.profiler import driver, session
    from outrider_runtime.profiler.documents import fit_drafter, fit_target
    from outrider_runtime.profiler.engines.vllm_engine import VLLMEngine

    bench, listeners = long._bench, list(long._loop.listeners)
    long.read_documents()
    with mock.patch.object(driver, "_prompt", lambda _vocabulary, group, index: long.prompt(group[0] + 1, index)):
        engine = VLLMEngine(bench.llm.llm_engine)
        engine.on_cpu = False  # what is measured later is not corrected for the core's speed either
        driving = driver.Driver(engine)
        ready = driving.ready()
        pace = replace(ready.pace, prompt_token_s=0.0)
        target = session.target_series(ready.limits, pace, DRAFTER, budget_s)
        target.order = [point for point in target.order if not point.prefill]  # no cell reads prompts
        drafter = session.drafter_series(ready.limits, pace, ready.drafters[DRAFTER], budget_s)
        budget = session.Budget(budget_s, time.process_time(), time.process_time)
        session.run([target, drafter], driving.visit, budget, lambda _line: None)
        driving._clear()
    long._loop.listeners[:], long._loop.profiled_placeholders = listeners, None
    fitted = fit_target(target)
    passes = fit_drafter(drafter, ready.drafters[DRAFTER])
    return {
        "target": {mode.value: asdict(fit.cost) for mode, fit in fitted.items()}, "draft": asdict(passes.cost),
        "firstPass": asdict(passes.first_pass), "shapes": len(target.order) + len(drafter.order),
        "heldOutErrorPercent": [_percent(error for fit in fitted.values() for error in fit.errors),
                                _percent(passes.errors)],
        "visits": [describe_visit(visit) for visit in (*target.visits, *drafter.visits)],
    }  # fmt: skip


def describe_visit(visit: Any) -> dict[str, Any]:
    """Return the milliseconds of each step that a visit of a shape measured."""
    target = [round(1000 * seen.target_s, 2) for seen in visit.samples]
    draft = [round(1000 * seen.draft_s[DRAFTER], 2) for seen in visit.samples if DRAFTER in seen.draft_s]
    return {"shape": str(visit.point), "target_ms": target, "draft_ms": draft}


def _percent(errors: Iterable[float]) -> float:
    return round(100 * median(errors), 1)


def latency_model(profile: dict[str, Any]) -> Any:
    from outrider_runtime.control.plans import ExecutionMode
    from outrider_runtime.control.step_times import DrafterCost, LatencyModel, StepCost

    draft = DrafterCost(StepCost(**profile["draft"]), True, StepCost(**profile["firstPass"]))
    return LatencyModel(
        {ExecutionMode(mode): StepCost(**cost) for mode, cost in profile["target"].items()}, {DRAFTER: draft}
    )


@contextmanager
def cpu_time(bench: Any) -> Iterator[None]:
    """Have scheduler and worker measure steps in the process's CPU time."""
    from outrider_runtime.step_clock import HostClock

    class CPUTime(HostClock):
        def mark(self) -> float:
            return time.process_time()

    bench.runner._clock = CPUTime()
    clock = SimpleNamespace(monotonic=time.process_time, time=time.time)
    with mock.patch("outrider_runtime.vllm_plugin.scheduler.time", clock):
        yield


def line(cell: Sequence[Seen]) -> str:
    speedups = "  ".join(f"{seen.arm}: {speedup(seen, cell[0]):.2f}" for seen in cell[1:])
    return f"{cell[0].context:5} tokens x {cell[0].batch}: {median(cell[0].cpu_ms):7.1f} ms a token; {speedups}"


def speedup(seen: Seen, plain: Seen) -> float:
    return median(ratios(seen, plain))


def ratios(seen: Seen, plain: Seen) -> list[float]:
    """Return the speed-up of each round."""
    return [two / mine for mine, two in zip(seen.cpu_ms, plain.cpu_ms, strict=True)]


# -- what the latency model predicts --------------------------------------------------------------------------------


def predictions(made: Sequence[Sequence[Seen]], profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Return measured and predicted speed-up of each fixed length in each cell."""
    model, predicted = latency_model(profile), []
    even = next(iter(model.target.values()))
    draft = model.drafters[DRAFTER]
    for cell in made:
        for seen in cell if cell[-1].arm == LOOP else ():
            drafted = seen.draft_tokens
            if not drafted:
                continue
            plain_s, step_s = (even.seconds(_shape(seen.context, seen.batch, k)) for k in (0, drafted))
            once = _shape(_tokens_read(seen), seen.batch, 0)
            step_s += draft.seconds(once, drafted)
            predicted.append(
                {"context": seen.context, "batch": seen.batch, "draftTokens": drafted,
                 "measured": round(speedup(seen, cell[0]), 3),
                 "predicted": round(median(seen.tokens_per_step) * plain_s / step_s, 3)}
            )  # fmt: skip
    return predicted


def _shape(context: float, batch: int, verified: int) -> Any:
    from outrider_runtime.control.step_times import Shape

    tokens = batch * (1 + verified)
    return Shape(context * batch, float(tokens), float(batch), context * tokens / 1000)


def _tokens_read(seen: Seen) -> float:
    from outrider_runtime.drafters import traits

    from tests.engine.engines import sparse_self

    return float(min(seen.context, traits(sparse_self(seen.window), PAGE).kv_budget or 0))


def document(made: Sequence[Sequence[Seen]], profile: dict[str, Any]) -> dict[str, Any]:
    predicted = predictions(made, profile)
    errors = [abs(prediction["predicted"] / prediction["measured"] - 1) for prediction in predicted]
    clear = [prediction for prediction in predicted if abs(prediction["measured"] - 1) > 0.05]
    return {
        "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
        "profile": profile, "medianErrorPercent": _percent(errors) if errors else None,
        "rightSideOfOne": [
            sum((prediction["measured"] > 1) == (prediction["predicted"] > 1) for prediction in clear), len(clear),
        ],
        "predicted": predicted, "cells": [[row(prediction, cell[0]) for prediction in cell] for cell in made],
    }  # fmt: skip


def row(seen: Seen, plain: Seen) -> dict[str, Any]:
    return {
        **asdict(seen), "target_ms": [round(median(seen.target_ms), 3)], "draft_ms": [round(median(seen.draft_ms), 3)],
        "speedup": round(speedup(seen, plain), 3), "speedups": [round(ratio, 3) for ratio in ratios(seen, plain)],
    }  # fmt: skip


def restore_cell(rows: Sequence[dict[str, Any]]) -> list[Seen]:
    return [Seen(**{name: row[name] for name in Seen.__dataclass_fields__ if name in row}) for row in rows]


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
            arm_rows = [row for row in rows if row["batch"] == batch and row["arm"] == arm]
            arm_rows.sort(key=lambda row: int(row["context"]))
            left.errorbar(
                [row["context"] for row in arm_rows],  [row["speedup"] for row in arm_rows], _spread(arm_rows),
                linestyle=style, marker="o", capsize=3, label=f"{batch} requests, {arm}",
            )  # fmt: skip
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(title=f"window {WINDOW}", xlabel="context (tokens)", ylabel="speed-up, CPU seconds a token")
    left.legend(fontsize=8)
    sweep = [row for row in rows if row["arm"].startswith("window")]
    rates = [row["accepted"][0] / max(1, row["tried"][0]) for row in sweep]
    windows = [row["window"] for row in sweep]
    right.errorbar(windows, [row["speedup"] for row in sweep], _spread(sweep), marker="o", capsize=3, label="speed-up")
    right.plot(windows, rates, marker="s", label="first proposals accepted")
    context, batch, length = SWEEP
    right.set(title=f"{batch} requests of {context} tokens, k = {length}", xlabel="window (tokens)", xscale="log")
    right.set_xticks(windows, [str(window) for window in windows])
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _spread(rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """(2, rows): from the lowest round to the median, and from there to the highest."""
    return [
        [row["speedup"] - min(row["speedups"]) for row in rows],
        [max(row["speedups"]) - row["speedup"] for row in rows],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a request in a round")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--profile-minutes", type=float, default=PROFILE_MINUTES, help="of CPU time")
    parser.add_argument("--resume", action="store_true", help="keep the profile and the cells that are there")
    options = parser.parse_args()
    measure(options, json.loads(RESULTS.read_text()) if options.resume else {})


def keep(measured: dict[str, Any]) -> None:
    """Save the results; called after the profile and each cell, so that a run that ends early loses nothing."""
    unfinished = RESULTS.with_suffix(".part")
    unfinished.write_text(json.dumps(measured, indent=1) + "\n")
    unfinished.replace(RESULTS)
    plot([row for cell in measured["cells"] for row in cell], PICTURE)
    right, clear = measured["rightSideOfOne"]
    print(
        f"predicted against measured: median error {measured['medianErrorPercent']}%, "
        f"{right} of {clear} on the right side"
    )


if __name__ == "__main__":
    main()
