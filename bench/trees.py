"""Trees and chains of the recorded EAGLE-3 head: tokens per step, calibration, goodput, time of a selection.

python -m bench.trees        writes results/trees.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.control.acceptance import Acceptance
from outrider_runtime.control.batch import NO_CLASS, Batch
from outrider_runtime.control.plans import ROOT, Forest, Purpose, trials
from outrider_runtime.control.settings import Settings
from outrider_runtime.control.value import Price
from outrider_runtime.control.verify import select
from outrider_runtime.simulate.recording import DEPTH, WIDTH, Recording
from outrider_runtime.simulate.replay.beams import RecordedBeams
from outrider_runtime.simulate.replay.recorded_proposals import mean_acceptance_rates
from outrider_runtime.simulate.replay.workload import Lengths, draw_closed_load

from bench.replay import trees
from bench.replay.settings import recording
from bench.replay.trees import CHAINS, TREES, Place

RESULT = Path(__file__).parent / "results" / "trees.json"
VERIFIED, LEAST = 16, {0.5: 1.15, 0.7: 1.05}
REQUESTS, WARM = 64, 0.25
"""Requests per step where edges are judged; share of the steps that only train the estimates."""
WORLDS = (
    "llama-3.1-8b-h200", "llama-3.1-8b-h100", "llama-3.1-8b-a100", "llama-3.1-8b-l40s", "llama-3.1-70b-4xh100",
    "llama-3.1-70b-4xa100", "smollm2-135m-cpu",
)  # fmt: skip
LOADS, ACCEPTANCES, LEAST_GOODPUT = (1, 8, 32), (0.5, 0.7, 0.9, None), 0.98
RUNS, STEPS, CANDIDATES, MOST_US = 5, 200, 32, 200.0


def batch(requests: int) -> Batch:
    """Make a batch of decoding requests that nothing limits."""
    nothing, much = np.zeros(requests, np.int64), np.full(requests, 1000)
    no_class = np.full(requests, NO_CLASS)
    return Batch(
        np.arange(requests), no_class, much, nothing, nothing, much, much, np.zeros(requests), nothing[None], 0.0, 8192,
        10**6,
    )  # fmt: skip


def read_forest(beams: RecordedBeams, at: NDArray[np.int64]) -> tuple[Forest, NDArray[np.bool_]]:
    """Read the whole beams at some positions, and which of their nodes the target accepts."""
    table = beams.table(at, np.full(len(at), DEPTH), WIDTH)
    request, parent, depth, rank, confidence = table.nodes
    forest = Forest(
        request, parent, np.zeros_like(request), depth, rank, confidence, np.zeros((1, len(at)), np.int64),
        np.array([DEPTH]), Purpose.CHOICE,
    )  # fmt: skip
    return forest, table.right[table.there]


# -- tokens a step, and calibration -----------------------------------------------------------------------------------


class Judged:
    """The loop's estimates on recorded beams, position by position; each is judged before the loop learns from it."""

    def __init__(self, made: Recording) -> None:
        self.known = Acceptance(Settings((TREES,), DEPTH, REQUESTS))
        beams = RecordedBeams(made.trees["eagle"])
        order = np.random.default_rng(0).permutation(made.start[-1])
        steps = len(order) // REQUESTS
        self.accepted: list[float] = []
        self.edges: list[tuple[int, int, float, bool]] = []
        """(rank, depth, estimated rate, accepted) of the nodes that were tried."""
        for step in range(steps):
            self._step(beams, order[step * REQUESTS :][:REQUESTS], judges=step >= WARM * steps)

    def _step(self, beams: RecordedBeams, at: NDArray[np.int64], *, judges: bool) -> None:
        running, (forest, right) = batch(len(at)), read_forest(beams, at)
        paths, everything = self.known.node_paths(running, forest), np.ones(len(forest), bool)
        tried = trials(forest, everything, right)
        if judges:
            self.accepted.append(float((right & likeliest(paths, forest.request)).sum()) / len(at))
            above = np.where(forest.parent == ROOT, 1.0, paths[forest.parent])
            edges = np.divide(paths, above, out=np.zeros_like(paths), where=tried)
            self.edges += list(
                zip(forest.rank[tried], forest.depth[tried], edges[tried], right[tried], strict=True)
            )  # fmt: skip
        self.known.observe(running, forest, everything, right, tried)
        self.known.release(np.arange(len(at)))  # each position is a request of its own

    @property
    def tokens(self) -> float:
        """Tokens of a request per step that verifies VERIFIED of its nodes, bonus token included."""
        return 1 + float(np.mean(self.accepted))


def likeliest(paths: NDArray[np.floating[Any]], request: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Select the VERIFIED best nodes of each request."""
    order = np.lexsort((np.arange(len(paths)), -paths, request))
    places = np.arange(len(order)) - np.searchsorted(request[order], request[order])
    chosen = np.zeros(len(paths), bool)
    chosen[order[places < VERIFIED]] = True
    return chosen


def best_chain(made: Recording) -> float:
    """Return the tokens per step of the longest chain. Depths that are not recorded get the mean of the last three."""
    acceptance = mean_acceptance_rates(made, "eagle")
    whole = np.concatenate([acceptance, np.full(VERIFIED - DEPTH, acceptance[-3:].mean())])
    return 1 + float(whole.cumprod().sum())


def measure_tokens(acceptance: float | None) -> dict[str, Any]:
    made = recording(acceptance)
    judged, chain = Judged(made), best_chain(made)
    ratio = judged.tokens / chain
    least = LEAST.get(acceptance or 0.0)
    figures = {"tree": round(judged.tokens, 3), "chain": round(chain, 3), "ratio": round(ratio, 3)}
    return figures | {"least": least, "holds": least is None or ratio >= least, "edges": judge_edges(judged)}


def judge_edges(judged: Judged) -> dict[str, Any]:
    """Return the log loss of the estimates and of mean rates by rank and depth (known afterwards), and the calibration
    error."""
    rank, depth, said, taken = (np.array(column) for column in zip(*judged.edges, strict=True))
    rates = np.zeros(len(said))
    for key in set(zip(rank.tolist(), depth.tolist(), strict=True)):
        at_edge = (rank == key[0]) & (depth == key[1])
        rates[at_edge] = taken[at_edge].mean()
    errors = [
        round(calibration_error(said[rank == edge_rank], taken[rank == edge_rank]), 4) for edge_rank in range(WIDTH)
    ]
    losses = (round(log_loss(chances, taken), 4) for chances in (said, rates))
    return dict(zip(("log loss", "of rates by depth"), losses, strict=True)) | {"calibration error by rank": errors}


def log_loss(said: NDArray[np.floating[Any]], taken: NDArray[np.bool_]) -> float:
    chance = np.clip(said, 1e-6, 1 - 1e-6)
    return float(-np.where(taken, np.log(chance), np.log1p(-chance)).mean())


def calibration_error(said: NDArray[np.floating[Any]], taken: NDArray[np.bool_], bins: int = 10) -> float:
    """Return the mean |estimated - observed rate| over equal parts of the nodes, ordered by estimate."""
    parts = np.array_split(np.argsort(said), bins)
    return float(np.mean([abs(said[part].mean() - taken[part].mean()) for part in parts if len(part)]))


# -- goodput ----------------------------------------------------------------------------------------------------------


def measure_goodput(seeds: int) -> list[dict[str, Any]]:
    rows = []
    for number, name in enumerate(WORLDS):
        for place_, requests in enumerate(LOADS):
            place = Place(name, ACCEPTANCES[(number + place_) % len(ACCEPTANCES)])
            ratios = [_goodput(place, requests, seed) for seed in range(seeds)]
            mean = float(np.mean(ratios))
            rows.append({"place": str(place), "requests": requests, "trees by chains": round(mean, 3)})
            rows[-1] |= {"least": round(min(ratios), 3), "holds": mean >= LEAST_GOODPUT}
            print(rows[-1], flush=True)
    return rows


def _goodput(place: Place, requests: int, seed: int) -> float:
    rng = np.random.default_rng([seed, requests])
    load = draw_closed_load(requests, 7 * requests + 8, recording(place.acceptance), None, rng, Lengths(300, 160))
    chains, wide = (
        trees.run(place, trees.loop_system(name, drafter), load, seed)
        for name, drafter in (("c", CHAINS), ("t", TREES))
    )
    return chains.now / wide.now  # the same tokens


# -- the time of a selection ------------------------------------------------------------------------------------------


def time_selection() -> dict[str, Any]:
    """Measure the thread CPU time of a selection over 64 requests of 32 candidates each; each step has a new forest."""
    made, price = recording(0.7), _price(REQUESTS * CANDIDATES)
    beams, rng, means = RecordedBeams(made.trees["eagle"]), np.random.default_rng(0), []
    known = Acceptance(Settings((TREES,), DEPTH, REQUESTS))
    for run in range(RUNS + 1):
        spent = 0.0
        for _ in range(STEPS):
            at = rng.integers(0, made.start[-1], REQUESTS)
            forest, _ = read_forest(beams, at)
            paths, nothing = known.node_paths(batch(REQUESTS), forest), np.zeros(len(forest), bool)
            started = time.thread_time()
            select(paths, forest.request, price, REQUESTS * CANDIDATES, nothing, np.inf)
            spent += time.thread_time() - started
        if run:  # the first one compiles
            means.append(1e6 * spent / STEPS)
    mean = float(np.mean(means))
    return {"mean us": round(mean, 1), "runs us": [round(mean, 1) for mean in means], "holds": mean <= MOST_US}


def _price(most: int) -> Price:
    """Make a price of an A100: tokens are more expensive past the knee."""
    tokens = np.arange(most + 1)
    seconds = 1.4e-2 + 3e-5 * tokens + 1e-4 * np.maximum(0, tokens - 150)
    return Price(seconds, np.zeros(REQUESTS), 5e3, 3e-5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--minutes", type=float, help="ignored: this benchmark always runs to its end")
    options = parser.parse_args()
    figures: dict[str, Any] = {"selection": time_selection()}
    print(figures["selection"])
    figures["tokens"] = {str(acceptance or "as recorded"): measure_tokens(acceptance) for acceptance in ACCEPTANCES}
    for name, row in figures["tokens"].items():
        print(name, row)
    figures["goodput"] = measure_goodput(options.seeds)
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
