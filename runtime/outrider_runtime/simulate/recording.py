"""What drafters proposed at every position of real answers, and how far the target agreed: recorded once, no text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider_runtime.simulate.data import FOLDER

DEPTH = 8
"""Longest proposal that was recorded."""
WIDTH = 4
"""Nodes of a recorded beam at each depth."""
OFF_PATH = -1
LOG_ODDS = 12.0
"""Confidences are log-odds within plus and minus this, in 8 bits."""


def quantised(log_odds: NDArray[np.floating]) -> NDArray[np.int8]:
    return np.asarray(np.clip(np.rint(log_odds * (127 / LOG_ODDS)), -127, 127), np.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """A drafter's beam at every position: P positions, DEPTH depths, at each the WIDTH nodes of the likeliest paths,
    likeliest first."""

    parent: NDArray[np.int8]
    """(P, DEPTH, WIDTH): the place of each node's parent at the depth before; 0 for the first depth."""
    confidence: NDArray[np.int8]
    """(P, DEPTH, WIDTH): log-odds of the node given its parent (`quantised`)."""
    on_path: NDArray[np.int8]
    """(P, DEPTH): the place of the node that the target takes, where it took one at every depth before; else
    OFF_PATH."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Columns over positions; the answers' positions follow one another."""

    drafters: tuple[str, ...]
    """`NAME/COVERAGE` is drafter NAME where its cache covers less than the whole text."""
    groups: tuple[str, ...]
    group: NDArray[np.int16]
    """(answers,) of the answer's prompt."""
    temperature: NDArray[np.float32]
    """(answers,)"""
    prompt_tokens: NDArray[np.int32]
    """(answers,)"""
    start: NDArray[np.int32]
    """(answers + 1,) where each answer's positions begin."""
    depth: NDArray[np.int8]
    """(drafters, positions) leading proposals that the target agreed with, DEPTH at most."""
    proposed: NDArray[np.int8]
    """(drafters, positions) proposals that there were: 0 where a lookup found nothing."""
    confidence: NDArray[np.int8]
    """(drafters, positions, DEPTH) what the drafter says of itself: a model's log-odds (`quantised`), a lookup's length
    of match."""
    trees: Mapping[str, Trees] = field(default_factory=dict)
    """By drafter, of those that beams were recorded of."""

    @property
    def answers(self) -> int:
        return len(self.group)

    def save(self, path: Path) -> None:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        for name, trees in self.trees.items():
            arrays |= {f"{name}:{part}": getattr(trees, part) for part in _TREE_ARRAYS}
        np.savez_compressed(path, drafters=np.array(self.drafters), groups=np.array(self.groups), **arrays)


_TREE_ARRAYS = ("parent", "confidence", "on_path")
_ARRAYS = ("group", "temperature", "prompt_tokens", "start", "depth", "proposed", "confidence")


@cache
def shipped() -> Recording:
    """SmolLM2-135M-Instruct with its drafters, on Spec-Bench's prompts (docs/how-to/simulate.md)."""
    return load(FOLDER / "recordings" / "smollm2.npz")


def load(path: Path) -> Recording:
    """Raises OSError where there is no such file, ValueError where it is no recording."""
    with np.load(path, allow_pickle=False) as file:
        missing = {"drafters", "groups", *_ARRAYS} - set(file.files)
        if missing:
            raise ValueError(f"{path} is no recording: it lacks {', '.join(sorted(missing))}")
        drafters, groups = (tuple(map(str, file[name])) for name in ("drafters", "groups"))
        beams = [name for name in drafters if f"{name}:parent" in file.files]
        trees = {name: Trees(*(file[f"{name}:{part}"] for part in _TREE_ARRAYS)) for name in beams}
        return Recording(drafters, groups, **{name: file[name] for name in _ARRAYS}, trees=trees)


def for_pool(
    recording: Recording, recorded_as: Mapping[str, str], acceptance: Mapping[str, float | None], seed: int
) -> Recording:
    """Under the names of a pool's drafters: `recorded_as` says whose proposals each makes, `acceptance` what it is
    lifted to; None: as recorded. Two that are recorded as one are lifted apart."""
    names: list[str] = []
    columns: list[tuple[NDArray[np.int8], NDArray[np.int8], NDArray[np.int8]]] = []
    for number, (drafter, source) in enumerate(recorded_as.items()):
        share = acceptance[drafter]
        one = recording if share is None else lifted(recording, share, seed + number)
        for column, name in enumerate(recording.drafters):
            base, slash, coverage = name.partition("/")
            if base == source:
                names.append(drafter + slash + coverage)
                columns.append((one.depth[column], one.proposed[column], one.confidence[column]))
    depth, proposed, confidence = (np.array(part) for part in zip(*columns, strict=True))
    return replace(recording, drafters=tuple(names), depth=depth, proposed=proposed, confidence=confidence)


STEEPNESS = 0.6
"""How much of a drafter's confidence a lifted acceptance keeps: log-odds of acceptance by log-odds said."""
LESS_COVERED = {"/no-prompt": 0.7, "/after-hole": 0.85}
"""Of the lifted acceptance, where a head has read less."""


def lifted(recording: Recording, acceptance: float, seed: int) -> Recording:
    """The same answers and confidences, with another target: one that accepts so much of a model's first proposals.

    A synthetic recording: each node is accepted with a probability that rises with its confidence, its mean over first
    nodes `acceptance`. Lookups stay as they are.
    """
    rng = np.random.default_rng([seed, round(acceptance * 1000)])
    depth, trees = recording.depth.copy(), dict(recording.trees)
    for number, name in enumerate(recording.drafters):
        if name == "lookup":
            continue
        share = next((share for ending, share in LESS_COVERED.items() if name.endswith(ending)), 1.0)
        odds = recording.confidence[number].astype(np.float64) * (LOG_ODDS / 127 * STEEPNESS)  # (positions, DEPTH)
        offset = _offset(odds[:, 0], acceptance * share)
        hits = rng.random(odds.shape) < _sigmoid(odds + offset)
        depth[number] = hits.cumprod(1).sum(1)
        if name in trees:
            draws = np.random.default_rng([seed, number, round(acceptance * 1000)])
            trees[name] = _lifted_trees(trees[name], hits, offset, draws)
    return replace(recording, depth=depth, trees=trees)


def _lifted_trees(trees: Trees, hits: NDArray[np.bool_], offset: float, rng: np.random.Generator) -> Trees:
    """Only the true token moves, to rank 1: there as the chain's `hits` (P, DEPTH) say, and beside the chain as likely.
    Where it does not, it is what was recorded; what was not recorded is drawn as often as it was where it was."""
    shares = later_shares(trees)
    odds = trees.confidence.astype(np.float64) * (LOG_ODDS / 127)
    on_path = np.full_like(trees.on_path, OFF_PATH)
    place = np.zeros(len(on_path), np.int64)
    chain, recorded, alive = (np.ones(len(on_path), bool) for _ in range(3))
    rows = np.arange(len(on_path))
    for depth in range(on_path.shape[1]):
        children = _children(trees, depth, place)
        first, any_child = children.argmax(1), children.any(1)
        sure = _sigmoid(STEEPNESS * odds[rows, depth, first] + offset)
        hit = np.where(chain, hits[:, depth], rng.random(len(rows)) < sure) & any_child
        was = trees.on_path[:, depth].astype(np.int64)
        drawn = _drawn_later(children, odds[:, depth], shares, rng)
        later = np.where(recorded & (was != first), was, drawn)
        place = np.where(hit, first, later)
        alive &= any_child & (place != OFF_PATH)
        place = np.where(alive, place, 0)
        on_path[:, depth] = np.where(alive, place, OFF_PATH)
        chain &= hit
        recorded &= was == place
    return Trees(trees.parent, trees.confidence, on_path)


def _children(trees: Trees, depth: int, place: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(P, WIDTH): nodes of a depth whose parent is at `place` (P,) of the depth before."""
    if depth == 0:
        return np.ones(trees.parent.shape[::2], bool)
    return np.asarray(trees.parent[:, depth] == place[:, None])


def _conditional(children: NDArray[np.bool_], odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """(P, WIDTH): what the drafter says of each child but the first one, given that that is wrong; 0 for others."""
    said, first = _sigmoid(odds), children.argmax(1)
    doubt = np.maximum(1 - said[np.arange(len(said)), first], 1e-4)
    found = np.where(children, said / doubt[:, None], 0.0)
    found[np.arange(len(said)), first] = 0.0
    return found


def _rank(children: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.asarray(children.cumsum(1) - 1)


def later_shares(trees: Trees) -> NDArray[np.float64]:
    """(WIDTH,): by rank among siblings, how often the target took a later child, by what its drafter said, where the
    first one was wrong."""
    odds = trees.confidence.astype(np.float64) * (LOG_ODDS / 127)
    said, took = np.full(trees.parent.shape[2], 1e-9), np.zeros(trees.parent.shape[2])
    place, alive = np.zeros(len(odds), np.int64), np.ones(len(odds), bool)
    for depth in range(odds.shape[1]):
        children, was = _children(trees, depth, place), trees.on_path[:, depth].astype(np.int64)
        trial = alive & children.any(1) & (was != children.argmax(1))
        chance, rank = _conditional(children, odds[:, depth]), _rank(children)
        for number in range(1, len(said)):
            of_rank = children & (rank == number) & trial[:, None]
            said[number] += chance[of_rank].sum()
            took[number] += (of_rank & (np.arange(len(said)) == was[:, None])).sum()
        alive &= was != OFF_PATH
        place = np.where(alive, was, 0)
    return np.asarray(took / said)


def _drawn_later(
    children: NDArray[np.bool_], odds: NDArray[np.float64], shares: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """(P,): a later child, or OFF_PATH."""
    chances = _conditional(children, odds) * np.where(children, shares[np.maximum(_rank(children), 0)], 0.0)
    above = rng.random(len(chances))[:, None] < chances.cumsum(1)
    return np.where(above.any(1), above.argmax(1), OFF_PATH)


def _offset(odds: NDArray[np.float64], mean: float) -> float:
    """What to add so that the mean probability is `mean`; bisection."""
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(odds + middle).mean() < mean else (low, middle)
    return low


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x)))
