"""Six checks on a GPU of a pool with DFlash, DSpark, EAGLE-3 and MTP.

    python -m bench.drafters_on_a_gpu [--cpu] [--only starts times ...]

writes results/drafters_on_a_gpu.json, a check at a time. Targets and drafts are SmolLM2's layers and planted weights
(`tests.engine.planted_models`): mechanics, graphs and memory are real, acceptance says nothing of published drafts.
`--cpu` is for a trial without a GPU.

starts    DFlash, DSpark, EAGLE-3, a draft model and a lookup in one engine: graphs of each, and whether greedy answers
          are those of plain decoding when the drafters take turns
times     milliseconds of an idle step, of one that feeds a block drafter (at most 2% more), of its block at the least
          and the most tokens (equal within 3%), and the share of steps in whole graphs
replay    whether proposals after fed and shortened steps, in ten rounds, are those of the same passes without graphs
memory    bytes of weights, and of KV a token, of each draft; what is reserved on the device
gaps      tokens accepted of each proposal: with a whole context, after 16 skipped steps, on a restored prefix
hybrid    a target with layers that keep a state, MTP and DFlash: KV groups, restored tokens, equal answers
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results" / "drafters_on_a_gpu.json"
BATCHES = (1, 16, 64)
MOST = 3
"""Draft tokens of a step."""
SKIPPED_STEPS = 16
ROUNDS = 10
IN_16_BITS = ("--dtype=bfloat16",)
"""GPUs serve in 16 bits. On a CPU only the hybrid needs it; in float32 the others' planted weights stay exact."""
PROMPT = "The old lighthouse keeper counted the waves: one, two, three, four, one, two. " * 8
HYBRID_REPEATS = 4
"""Length of the hybrid's prompts / that of others: pages of a state are long, and only whole ones are restored."""


def prompts(count: int, repeats: int = 1) -> list[str]:
    return [f"Day {number}. {PROMPT * repeats}" for number in range(count)]


# -- orders of a step -------------------------------------------------------------------------------------------------


def order_nothing(_step: int, _requests: list[str], order: Any) -> Any:
    return order


def order_alone(member: int, tokens: int, skipped: int = 0) -> Callable[..., Any]:
    """Order one member at each step after the first `skipped`; with 0 tokens it is only fed."""

    def give(step: int, _requests: list[str], order: Any) -> Any:
        if step >= skipped:
            order.passes[member] = tokens
            if tokens:
                order.chosen[:] = member
        return order._replace(draft_tokens=tokens if step >= skipped else 0)

    return give


# -- checks -----------------------------------------------------------------------------------------------------------


def starts(engine: Any) -> dict[str, Any]:
    from tests.engine.test_block_drafts import by_turns

    texts = prompts(20)
    plain, drafted = engine.run(texts, order_nothing), engine.run(texts, by_turns, arrive_every=2)
    failed = [report.failures for _, report in engine.orders_and_reports if report.failures]
    return {"leftOut": engine.failures, "graphs": graphs(engine), "failures": failed} | compare_answers(plain, drafted)


def times(engine: Any) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for batch in (size for size in BATCHES if size <= engine.scheduler.max_num_running_reqs):
        texts = prompts(batch)
        row = {"idleMs": step_ms(engine, texts, order_nothing)}
        for number in members(engine, "block"):
            name = engine.names[number]
            row |= {
                f"{name} {tokens} tokens Ms": step_ms(engine, texts, order_alone(number, tokens))
                for tokens in (0, 1, MOST)
            }
            with count_graphs(engine) as whole:
                engine.run(texts, order_alone(number, MOST))
            row[f"{name} whole graphs"] = round(whole["target"] / len(engine.orders_and_reports), 3)
        results[f"{batch} requests"] = row
    return results


def replay(engine: Any) -> dict[str, Any]:
    from tests.engine.test_block_drafts import fed_then_short

    texts, results = prompts(2), {}
    for number in members(engine, "block", "head", "draft"):
        different = 0
        for _ in range(ROUNDS):
            engine.run(texts, fed_then_short(number))
            with_graphs = dict(engine.scheduler.proposals)
            with eager(engine.member(number)):
                engine.run(texts, fed_then_short(number))
            different += with_graphs != dict(engine.scheduler.proposals)
        results[engine.names[number]] = {"rounds": ROUNDS, "different": different}
    return results


def memory(engine: Any) -> dict[str, Any]:
    import torch

    drafts = {name: taken.model_dump() for name, taken in engine.memory.items()}
    on_gpu = torch.cuda.is_available()
    return {"drafts": drafts, "allocatedBytes": torch.cuda.memory_reserved() if on_gpu else None}


def gaps(engine: Any) -> dict[str, Any]:
    texts, results = prompts(4), {}
    for number in members(engine, "block", "head"):
        whole = mean_accepted(engine, engine.run(texts, order_alone(number, MOST)), number)
        after_gap = mean_accepted(engine, engine.run(texts, order_alone(number, MOST, SKIPPED_STEPS)), number)
        engine.run(texts, order_nothing)
        restored = mean_accepted(engine, engine.run(texts, order_alone(number, MOST), keep_prefixes=True), number)
        results[engine.names[number]] = {
            "whole": whole,
            f"after {SKIPPED_STEPS} steps": after_gap,
            "restored": restored,
        }
    return results


def hybrid(engine: Any) -> dict[str, Any]:
    from tests.engine.test_block_drafts import everything

    texts = prompts(4, HYBRID_REPEATS)
    plain, drafted = engine.run(texts, order_nothing), engine.run(texts, everything)
    again = engine.run(texts, everything, keep_prefixes=True)
    specs = [group.kv_cache_spec for group in engine.scheduler.kv_cache_config.kv_cache_groups]
    return {
        "leftOut": engine.failures, "kvGroups": {type(spec).__name__: spec.block_size for spec in specs},
        "restoredTokens": sum(engine.restored_tokens), **compare_answers(plain, drafted),
        "equalOnPrefixes": compare_answers(plain, again),
    }  # fmt: skip


# -- what they share --------------------------------------------------------------------------------------------------


def compare_answers(plain: Sequence[list[int]], drafted: Sequence[list[int]]) -> dict[str, Any]:
    """Count equal answers, and average the equal first tokens: in 16 bits a tie may part two answers that are right."""
    pairs = list(zip(plain, drafted, strict=True))
    common = [
        next((at for at, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), len(pair[0])) for pair in pairs
    ]
    return {"equal": sum(a == b for a, b in pairs), "of": len(pairs), "commonTokens": sum(common) / len(pairs)}


def members(engine: Any, *kinds: str) -> list[int]:
    """List the numbers of the loaded members of these kinds; a member's kind is the first part of its name."""
    loaded = engine.runner.speculator._members
    return [number for number, name in enumerate(engine.names) if name.split("-")[0] in kinds and number in loaded]


def managers(member: Any) -> list[Any]:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    return [value for value in vars(member).values() if isinstance(value, CudaGraphManager)]


def graphs(engine: Any) -> dict[str, int]:
    """Count the graphs captured for the target and for each member."""
    loaded = engine.runner.speculator._members
    counts = {
        engine.names[number]: sum(len(manager.graphs) for manager in managers(member))
        for number, member in loaded.items()
    }
    return {"target": sum(len(manager.graphs) for manager in managers(engine.runner)), **counts}


@contextmanager
def eager(member: Any) -> Iterator[None]:
    """Run the member's passes without graphs in this context."""
    captured = [manager for manager in managers(member) if manager._graphs_captured]
    for manager in captured:
        manager._graphs_captured = False
    try:
        yield
    finally:
        for manager in captured:
            manager._graphs_captured = True


@contextmanager
def count_graphs(engine: Any) -> Iterator[dict[str, int]]:
    """Count the steps in this context whose target ran in a whole graph."""
    counts, manager = {"target": 0}, engine.runner.cudagraph_manager
    run = manager.run_fullgraph

    def run_and_count(*arguments: Any, **keywords: Any) -> Any:
        counts["target"] += 1
        return run(*arguments, **keywords)

    manager.run_fullgraph = run_and_count
    try:
        yield counts
    finally:
        manager.run_fullgraph = run


def step_ms(engine: Any, texts: Sequence[str], give: Callable[..., Any]) -> float:
    """Return the median duration of the steps in which every request decodes."""
    began_s, steps_s = time.perf_counter(), list[float]()

    def note_step_time(_step: int) -> None:
        nonlocal began_s
        moment_s = time.perf_counter()
        if len(engine.scheduler.scheduled) == len(texts):
            steps_s.append(moment_s - began_s)
        began_s = moment_s

    engine.run(texts, give, before_step=note_step_time)
    return round(1e3 * median(steps_s[2:]), 4)


def mean_accepted(engine: Any, answers: Sequence[list[int]], number: int) -> float:
    """Return the mean number of tokens accepted of this member's proposals."""
    kept = list[int]()
    for (member, request, known), tokens in engine.scheduler.proposals.items():
        if member == number:
            rest = answers[int(request)][known - engine.prompt_tokens[int(request)] :]
            equals = [a == b for a, b in zip(tokens, rest, strict=False)]
            kept.append(equals.index(False) if False in equals else len(equals))
    return round(sum(kept) / max(1, len(kept)), 3)


# -- engines ----------------------------------------------------------------------------------------------------------


def pool(folder: Path) -> list[Any]:
    from tests.engine import engines, planted_models

    successors = {token: token + 1 for token in range(300)}
    return [
        engines.lookup("lookup"),
        engines.eagle(planted_models.eagle_of_small(folder / "head"), "head"),
        engines.block(planted_models.dspark(folder / "spark", successors), "block-dspark"),
        engines.block(planted_models.dflash(folder / "flash"), "block-dflash"),
        engines.draft_model(engines.POOR_DRAFT, "draft"),
    ]


def hybrid_pool(folder: Path) -> list[Any]:
    from tests.engine import engines, planted_models

    return [
        engines.lookup("lookup"),
        engines.mtp("mtp"),
        engines.block(planted_models.dflash(folder / "flash"), "block"),
    ]


@contextmanager
def start_engine(check: str, folder: Path) -> Iterator[Any]:
    from tests.engine import engines, planted_models
    from tests.engine.ordered import ordered

    made = folder / check
    if check == "hybrid":
        target, drafters = planted_models.qwen3_next(made / "target", recurrent=(1, 2, 4)), hybrid_pool(made)
    else:
        target, drafters = engines.SMALL, pool(made)
    extra = IN_16_BITS if check == "hybrid" or engines.DEVICE != "cpu" else ()
    with ordered(drafters, target=target, extra=extra) as engine:
        yield engine


CHECKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "starts": starts,
    "times": times,
    "replay": replay,
    "memory": memory,
    "gaps": gaps,
    "hybrid": hybrid,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--cpu", action="store_true", help="a trial: writes no results")
    options = parser.parse_args()
    os.environ.setdefault("OUTRIDER_TEST_DEVICE", "cpu" if options.cpu else "gpu")
    os.environ.setdefault("OUTRIDER_TEST_DEVICE_ARGUMENTS", "--enforce-eager" if options.cpu else "--max-num-seqs=64")
    results: dict[str, Any] = {}
    engines = [["hybrid"] if "hybrid" in options.only else [], [name for name in options.only if name != "hybrid"]]
    for names in filter(
        None, engines
    ):  # the hybrid first: a mixture of experts needs a process that had no engine before
        with tempfile.TemporaryDirectory() as folder, start_engine(names[0], Path(folder)) as engine:
            for name in names:
                results[name] = CHECKS[name](engine)
                print(json.dumps({name: results[name]}), flush=True)
                if not options.cpu:
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
