"""Make a recording: what each drafter would have proposed at every position of the target's own answers.

    make recording PROMPTS=spec_bench.jsonl

The target answers each prompt once, two thirds of them greedily and a third at temperature 0.7. A greedy proposal
equals the sampled token with exactly the probability with which rejection sampling accepts it.

Each batch of prompts is a part with a file of its own, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from outrider_runtime.simulate.recording import DEPTH, OFF_PATH, WIDTH, Recording, Trees, load, quantise
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as lookup

from bench.record import beams, blocks, chains
from bench.record.parts import Part, join_recordings, join_trees, parts
from bench.record.prompts import GROUPS, read_groups
from setup.drafts import EAGLE, FIRST_LAYERS
from setup.model import FOLDER
from training.block_head import checkpoint as block_checkpoint
from training.block_head.head import BlockHead
from training.eagle3 import checkpoint
from training.eagle3.head import Head
from training.target import Answer, Target

GAP = 32
LOOKUP = {"min_ngram": 2, "max_ngram": 4, "max_model_len": 1 << 20, "k": DEPTH}
"""The settings of examples/smollm2-cpu.yaml."""
WINDOWS = {"sparse": (4, 64)}
"""Sparse self-speculation: the first tokens and the last ones that the target sees while it drafts."""
DRAFTERS = ("lookup", "eagle", "draft", *WINDOWS)


class Models(NamedTuple):
    target: Target
    head: Head
    block: BlockHead | None
    draft: PreTrainedModel


class Proposals(NamedTuple):
    """Proposals of one drafter at the M positions of one answer."""

    depth: np.ndarray
    """(M,) leading proposals that the target agreed with."""
    proposed: np.ndarray
    """(M,) Proposed tokens: a block head proposes fewer than DEPTH."""
    confidence: np.ndarray
    """(M, DEPTH) Quantised confidences."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompts", type=Path, help="JSON lines with `category` and `turns`")
    parser.add_argument("--count", type=int, default=24, help="prompts of each of the three groups (default 24)")
    parser.add_argument("--length", type=int, default=128, help="positions of an answer (default 128)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further part after so many")
    parser.add_argument("--only", nargs="+", choices=DRAFTERS, default=DRAFTERS, help="some drafters; beams with all")
    parser.add_argument("--block-head", type=Path, metavar="FOLDER", help="record this block head, too")
    parser.add_argument("--parts", type=Path, default=Path(".outrider/recording"), metavar="FOLDER")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the recording, .npz")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    all_parts = list(parts(read_groups(options.prompts, options.count)))
    options.parts.mkdir(parents=True, exist_ok=True)
    missing = [part for part in all_parts if not part.file(options.parts).exists()]
    models = _models(options.block_head) if missing else None
    for number, part in enumerate(missing):
        if time.monotonic() > until or models is None:
            print(f"{len(missing) - number} of {len(all_parts)} parts are left; the same command goes on with them")
            return 1
        _write(part, models, options.only, options.length, options.parts)
    recording = join_recordings([load(part.file(options.parts)) for part in all_parts], tuple(GROUPS))
    recording.save(options.output)
    print(f"{options.output}: {recording.answers} answers, {recording.start[-1]} positions")
    return 0


def _models(block_head: Path | None) -> Models:
    target = Target(FOLDER, "cpu")
    target.model.float()  # as fast as bfloat16 or faster on most CPUs, and equal on all
    return Models(
        target,
        checkpoint.load(EAGLE, target).float(),
        None if block_head is None else block_checkpoint.load(block_head, target).float(),
        AutoModelForCausalLM.from_pretrained(FIRST_LAYERS, dtype=torch.float32).eval(),
    )


def _write(part: Part, models: Models, drafters: Collection[str], length: int, folder: Path) -> None:
    """Record a part and write its file. Sampling does not depend on the parts made before."""
    torch.manual_seed(zlib.crc32(part.name.encode()))
    prompts = [models.target.encode(text) for text in part.prompts]
    answers = models.target.write(prompts, length + DEPTH + 1, part.temperature)
    long = [answer for answer in answers if len(answer.tokens) - answer.prompt > 2 * DEPTH]
    rows = [_row(part, models, answer, drafters) for answer in long]
    partial = part.file(folder).with_suffix(".partial.npz")
    _join_rows(rows, [part.group]).save(partial)
    partial.rename(part.file(folder))
    print(f"{part.name}: {len(rows)} answers", flush=True)


class Row(NamedTuple):
    group: str
    temperature: float
    prompt: int
    proposals: Mapping[str, Proposals]
    trees: Trees | None
    """Beams of the head."""


def _row(part: Part, models: Models, answer: Answer, drafters: Collection[str]) -> Row:
    trees = _trees(models, answer) if len(drafters) == len(DRAFTERS) else None
    return Row(part.group, part.temperature, answer.prompt, _proposals(models, answer, drafters), trees)


def _proposals(models: Models, answer: Answer, drafters: Collection[str]) -> dict[str, Proposals]:
    """Return the proposals at each position whose next DEPTH tokens are known.

    The answer's first token comes from the prefill, so the first position is after it.
    """
    tokens, last = answer.tokens, len(answer.tokens) - DEPTH - 1
    count = last - answer.prompt
    target_tokens = tokens[answer.prompt + 1 :].unfold(0, DEPTH, 1)[:count]  # (M, K)
    by_drafter = dict[str, Proposals]()
    if "lookup" in drafters:
        by_drafter["lookup"] = _look_up(tokens.numpy(), answer.prompt, target_tokens)
    if "eagle" in drafters:
        by_drafter |= {
            name: _compare_with_target(made, target_tokens) for name, made in _propose_with_eagle(models, answer, count)
        }
    text = tokens[:last]
    if "draft" in drafters:
        made = chains.propose_with_model(models.draft, text, answer.prompt, count, DEPTH, chains.see_everything)
        by_drafter["draft"] = _compare_with_target(made, target_tokens)
    for name, (sinks, window) in WINDOWS.items():
        if name in drafters:
            visible = chains.see_sinks_and_window(sinks, window)
            made = chains.propose_with_model(models.target.model, text, answer.prompt, count, DEPTH, visible)
            by_drafter[name] = _compare_with_target(made, target_tokens)
    if models.block is not None:
        made = blocks.propose_with_block_head(models.block, models.target, answer, count)
        by_drafter["block"] = _compare_with_target(made, target_tokens)
    return by_drafter


def _propose_with_eagle(models: Models, answer: Answer, count: int) -> Iterator[tuple[str, chains.Chains]]:
    """Yield the head's chains for each extent of the text that it may have read."""
    coverages = {
        "eagle": chains.see_everything,
        "eagle/no-prompt": chains.see_answer(answer.prompt),
        "eagle/after-hole": chains.see_without_gap(GAP),
    }
    for name, visible in coverages.items():
        made = chains.propose_with_head(
            models.head, models.target.embed, answer.tokens, answer.fused, answer.prompt - 1, count, DEPTH, visible
        )
        yield name, made


def _trees(models: Models, answer: Answer) -> Trees:
    """Record the head's beams at the positions of `_proposals`."""
    tokens, first, last = answer.tokens, answer.prompt - 1, len(answer.tokens) - DEPTH - 1
    count = last - answer.prompt
    target_tokens = tokens[answer.prompt + 1 :].unfold(0, DEPTH, 1)[:count]  # (M, K)
    made = beams.propose_beams(
        models.head, models.target.embed, tokens, answer.fused, first, count, DEPTH, WIDTH, chains.see_everything
    )
    odds = made.logprob - torch.log1p(-made.logprob.exp().clamp(max=1 - 1e-6))
    parent = made.parent.numpy().astype(np.int8)
    return Trees(parent, quantise(odds.numpy()), _find_path(parent, (made.tokens == target_tokens[..., None]).numpy()))


def _find_path(parent: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return (M, K), see `Trees.on_path`. right (M, K, w): whether a node's token is the target's at that depth."""
    place, paths = np.zeros(len(right), np.int8), np.full(right.shape[:2], OFF_PATH, np.int8)
    for depth in range(right.shape[1]):
        holds = right[:, depth] & (parent[:, depth] == place[:, None])
        place = np.where(holds.any(1), holds.argmax(1), OFF_PATH).astype(np.int8)
        paths[:, depth] = place
    return paths


def _compare_with_target(made: chains.Chains, target_tokens: Tensor) -> Proposals:
    length = made.tokens.shape[1]
    agreed = (made.tokens == target_tokens[:, :length]).int().cumprod(1).sum(1)
    confidence = np.pad(quantise(made.confidence.numpy()), ((0, 0), (0, DEPTH - length)))
    return Proposals(agreed.numpy(), np.full(len(agreed), length), confidence)


def _look_up(tokens: np.ndarray, prompt: int, target_tokens: Tensor) -> Proposals:
    """Propose with vLLM's own lookup. A confidence is the length of the match in tokens."""
    depth, proposed = np.zeros(len(target_tokens), int), np.zeros(len(target_tokens), int)
    confidence = np.zeros((len(target_tokens), DEPTH), np.int8)
    for place, expected in enumerate(target_tokens.numpy()):
        text = tokens[: prompt + place + 1].astype(np.int32)
        match = lookup(text, **LOOKUP)
        proposed[place] = len(match)
        depth[place] = int((match == expected[: len(match)]).cumprod().sum())
        confidence[place] = _match_length(text) if len(match) else 0
    return Proposals(depth, proposed, confidence)


def _match_length(text: np.ndarray) -> int:
    return max(
        size
        for size in range(LOOKUP["min_ngram"], LOOKUP["max_ngram"] + 1)
        if len(lookup(text, **(LOOKUP | {"min_ngram": size, "max_ngram": size}))) or size == LOOKUP["min_ngram"]
    )


def _join_rows(rows: Sequence[Row], groups: Sequence[str]) -> Recording:
    lengths = [len(next(iter(row.proposals.values())).depth) for row in rows]
    names, trees = list(rows[0].proposals), [row.trees for row in rows if row.trees is not None]

    def column(field: str) -> np.ndarray:
        return np.stack([np.concatenate([getattr(row.proposals[name], field) for row in rows]) for name in names])

    return Recording(
        drafters=tuple(names),
        groups=tuple(groups),
        group=np.array([groups.index(row.group) for row in rows], np.int16),
        temperature=np.array([row.temperature for row in rows], np.float32),
        prompt_tokens=np.array([row.prompt for row in rows], np.int32),
        start=np.cumsum([0, *lengths]).astype(np.int32),
        depth=column("depth").astype(np.int8),
        proposed=column("proposed").astype(np.int8),
        confidence=column("confidence").astype(np.int8),
        trees={"eagle": join_trees(trees)} if trees else {},
    )


if __name__ == "__main__":
    sys.exit(main())
