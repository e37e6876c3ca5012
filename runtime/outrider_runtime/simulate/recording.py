"""A recording: what drafters proposed at each position of real answers, and how much the target accepted; no text."""

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
OFF_PATH = -1  # no node of the beam has the target's token
LOG_ODDS = 12.0
"""Confidences are log-odds within plus and minus this, in 8 bits."""


def quantise(log_odds: NDArray[np.floating]) -> NDArray[np.int8]:
    return np.asarray(np.clip(np.rint(log_odds * (127 / LOG_ODDS)), -127, 127), np.int8)


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """A drafter's beam at each of P positions: at each of DEPTH depths the WIDTH likeliest nodes, likeliest first."""

    parent: NDArray[np.int8]
    """(P, DEPTH, WIDTH): rank of each node's parent at the depth before; 0 for the first depth."""
    confidence: NDArray[np.int8]
    """(P, DEPTH, WIDTH): log-odds of the node given its parent (`quantised`)."""
    on_path: NDArray[np.int8]
    """(P, DEPTH): rank of the node that the target accepts, if it accepted one at each depth before; else OFF_PATH."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Columns over positions; the answers' positions follow one another."""

    drafters: tuple[str, ...]
    """Names; `NAME/COVERAGE` is drafter NAME with a cache that covers less than the whole text."""
    groups: tuple[str, ...]
    group: NDArray[np.int16]
    """(answers,): group of the answer's prompt."""
    temperature: NDArray[np.float32]
    """(answers,)"""
    prompt_tokens: NDArray[np.int32]
    """(answers,)"""
    start: NDArray[np.int32]
    """(answers + 1,): first position of each answer."""
    depth: NDArray[np.int8]
    """(drafters, positions): accepted length of the proposal, DEPTH at most."""
    proposed: NDArray[np.int8]
    """(drafters, positions): tokens proposed; 0 if a lookup found nothing, at most its block of a block head."""
    confidence: NDArray[np.int8]
    """(drafters, positions, DEPTH): confidences: log-odds of a model (`quantised`), match lengths of a lookup."""
    trees: Mapping[str, Trees] = field(default_factory=dict)
    """Recorded beams, by drafter."""

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
def load_shipped() -> Recording:
    """Load the recording of SmolLM2-135M-Instruct and its drafters on Spec-Bench (docs/how-to/simulate.md)."""
    return load(FOLDER / "recordings" / "smollm2.npz")


@cache
def load_shipped_with_block_head() -> Recording:
    """Recording of a block head, the EAGLE-3 head and lookups on the same prompts, answered again; without beams."""
    return load(FOLDER / "recordings" / "smollm2_block.npz")


def load(path: Path) -> Recording:
    """Load a recording. Raises OSError if the file is missing, ValueError if it is not a recording."""
    with np.load(path, allow_pickle=False) as file:
        missing = {"drafters", "groups", *_ARRAYS} - set(file.files)
        if missing:
            raise ValueError(f"{path} is no recording: it lacks {', '.join(sorted(missing))}")
        drafters, groups = (tuple(map(str, file[name])) for name in ("drafters", "groups"))
        beams = [name for name in drafters if f"{name}:parent" in file.files]
        trees = {name: Trees(*(file[f"{name}:{part}"] for part in _TREE_ARRAYS)) for name in beams}
        return Recording(drafters, groups, **{name: file[name] for name in _ARRAYS}, trees=trees)


def rename_for_pool(
    recording: Recording, recorded_as: Mapping[str, str], acceptance: Mapping[str, float | None], seed: int
) -> Recording:
    """Return the recording under the names of a pool's drafters.

    recorded_as: name in the recording, by drafter. acceptance: acceptance rate that a drafter is lifted to; None: as
    recorded. Two drafters with one recording are lifted independently.
    """
    names: list[str] = []
    columns: list[tuple[NDArray[np.int8], ...]] = []
    for number, (drafter, source) in enumerate(recorded_as.items()):
        share = acceptance[drafter]
        source_recording = recording if share is None else lift(recording, share, seed + number)
        for column, name in enumerate(recording.drafters):
            base, slash, coverage = name.partition("/")
            if base == source:
                names.append(drafter + slash + coverage)
                lifted_columns = source_recording.depth, source_recording.proposed, source_recording.confidence
                columns.append(tuple(part[column] for part in lifted_columns))
    depth, proposed, confidence = (np.array(part) for part in zip(*columns, strict=True))
    return replace(recording, drafters=tuple(names), depth=depth, proposed=proposed, confidence=confidence)


STEEPNESS = 0.6
"""Slope of a lifted acceptance: log-odds of acceptance / log-odds of the drafter's confidence."""
LESS_COVERED = {"/no-prompt": 0.7, "/after-hole": 0.85}
"""Factor of the lifted acceptance for a head whose cache covers less."""


def lift(recording: Recording, acceptance: float, seed: int) -> Recording:
    """Make a synthetic recording: the same answers and confidences, with a target that accepts more or less.

    Each node is accepted with a probability that rises with its confidence; its mean over first nodes is `acceptance`.
    Lookups do not change.
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
        depth[number] = np.minimum(hits.cumprod(1).sum(1), recording.proposed[number])
        if name in trees:
            draws = np.random.default_rng([seed, number, round(acceptance * 1000)])
            trees[name] = _lift_trees(trees[name], hits, offset, draws)
    return replace(recording, depth=depth, trees=trees)


def _lift_trees(trees: Trees, hits: NDArray[np.bool_], offset: float, rng: np.random.Generator) -> Trees:
    """Move the accepted token to rank 1, and change nothing else.

    On the chain it moves at `hits` (P, DEPTH), on other paths with the same probability. Where it does not move, it
    stays as recorded; where nothing was recorded, it is drawn with the recorded frequency.
    """
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
        drawn = _draw_later_child(children, odds[:, depth], shares, rng)
        later = np.where(recorded & (was != first), was, drawn)
        place = np.where(hit, first, later)
        alive &= any_child & (place != OFF_PATH)
        place = np.where(alive, place, 0)
        on_path[:, depth] = np.where(alive, place, OFF_PATH)
        chain &= hit
        recorded &= was == place
    return Trees(trees.parent, trees.confidence, on_path)


def _children(trees: Trees, depth: int, place: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(P, WIDTH): nodes of a depth whose parent has rank `place` (P,) at the depth before."""
    if depth == 0:
        return np.ones(trees.parent.shape[::2], bool)
    return np.asarray(trees.parent[:, depth] == place[:, None])


def _conditional(children: NDArray[np.bool_], odds: NDArray[np.float64]) -> NDArray[np.float64]:
    """(P, WIDTH): the drafter's P(child | the first child is wrong) of each later child; 0 for other nodes."""
    probability, first = _sigmoid(odds), children.argmax(1)
    doubt = np.maximum(1 - probability[np.arange(len(probability)), first], 1e-4)
    conditional = np.where(children, probability / doubt[:, None], 0.0)
    conditional[np.arange(len(probability)), first] = 0.0
    return conditional


def _rank(children: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.asarray(children.cumsum(1) - 1)


def later_shares(trees: Trees) -> NDArray[np.float64]:
    """(WIDTH,): by rank among siblings, how often the target accepted a later child / the drafter's probability of it.

    Only positions at which the first child was wrong count.
    """
    odds = trees.confidence.astype(np.float64) * (LOG_ODDS / 127)
    expected, accepted = np.full(trees.parent.shape[2], 1e-9), np.zeros(trees.parent.shape[2])
    place, alive = np.zeros(len(odds), np.int64), np.ones(len(odds), bool)
    for depth in range(odds.shape[1]):
        children, was = _children(trees, depth, place), trees.on_path[:, depth].astype(np.int64)
        trial = alive & children.any(1) & (was != children.argmax(1))
        chance, rank = _conditional(children, odds[:, depth]), _rank(children)
        for number in range(1, len(expected)):
            of_rank = children & (rank == number) & trial[:, None]
            expected[number] += chance[of_rank].sum()
            accepted[number] += (of_rank & (np.arange(len(expected)) == was[:, None])).sum()
        alive &= was != OFF_PATH
        place = np.where(alive, was, 0)
    return np.asarray(accepted / expected)


def _draw_later_child(
    children: NDArray[np.bool_], odds: NDArray[np.float64], shares: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """(P,): draw a later child, or OFF_PATH."""
    chances = _conditional(children, odds) * np.where(children, shares[np.maximum(_rank(children), 0)], 0.0)
    above = rng.random(len(chances))[:, None] < chances.cumsum(1)
    return np.where(above.any(1), above.argmax(1), OFF_PATH)


def _offset(odds: NDArray[np.float64], mean: float) -> float:
    """Find the offset with which the mean probability is `mean`, by bisection."""
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(odds + middle).mean() < mean else (low, middle)
    return low


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x)))
