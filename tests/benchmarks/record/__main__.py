"""Makes a recording: what each drafter would have proposed at every position of the target's own answers.

    make recording PROMPTS=spec_bench.jsonl

The target answers each prompt once, two thirds greedily and a third at temperature 0.7. For a greedy proposal, "equals
the token that was sampled" has exactly the probability with which rejection sampling accepts it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from eagle3 import checkpoint
from eagle3.head import Head
from eagle3.target import Answer, Target
from outrider_runtime.simulate.recording import DEPTH, Recording, quantised
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as lookup

from setup.drafts import EAGLE, FIRST_LAYERS
from setup.model import FOLDER
from tests.benchmarks.record import chains
from tests.benchmarks.record.prompts import by_group

HOLE = 32
LOOKUP = {"min_ngram": 2, "max_ngram": 4, "max_model_len": 1 << 20, "k": DEPTH}
"""The settings of examples/smollm2-cpu.yaml."""
WINDOWS = {"sparse": (4, 64)}
"""Sparse self-speculation: the first tokens and the last ones that the target sees while it drafts."""
SAMPLED = 0.7
ONE_IN = 3
BATCH = 16


class Models(NamedTuple):
    target: Target
    head: Head
    draft: PreTrainedModel


class Proposals(NamedTuple):
    """Of the M positions of one answer, by one drafter."""

    depth: np.ndarray
    """(M,) leading proposals that the target agreed with."""
    proposed: np.ndarray
    """(M,)"""
    confidence: np.ndarray
    """(M, DEPTH)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompts", type=Path, help="JSON lines with `category` and `turns`")
    parser.add_argument("--count", type=int, default=24, help="prompts of each of the three groups (default 24)")
    parser.add_argument("--length", type=int, default=128, help="positions of an answer (default 128)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the recording, .npz")
    options = parser.parse_args()
    torch.manual_seed(0)
    target = Target(FOLDER, "cpu")
    target.model.float()  # on CPUs without bfloat16 arithmetic four times faster
    models = Models(
        target,
        checkpoint.load(EAGLE, target).float(),
        AutoModelForCausalLM.from_pretrained(FIRST_LAYERS, dtype=torch.float32).eval(),
    )
    groups = by_group(options.prompts, options.count)
    rows = list(_rows(models, groups, options.length))
    _recording(rows, list(groups)).save(options.output)
    print(f"{options.output}: {len(rows)} answers, {sum(len(row.proposals['eagle'].depth) for row in rows)} positions")


class Row(NamedTuple):
    group: str
    temperature: float
    prompt: int
    proposals: Mapping[str, Proposals]


def _rows(models: Models, groups: Mapping[str, Sequence[str]], length: int) -> Iterator[Row]:
    for group, texts in groups.items():
        prompts = [models.target.encode(text) for text in texts]
        for temperature, chosen in (
            (0.0, [one for place, one in enumerate(prompts) if place % ONE_IN]),
            (SAMPLED, prompts[::ONE_IN]),
        ):
            for start in range(0, len(chosen), BATCH):
                for answer in models.target.write(chosen[start : start + BATCH], length + DEPTH + 1, temperature):
                    if len(answer.tokens) - answer.prompt > 2 * DEPTH:
                        yield Row(group, temperature, answer.prompt, _proposals(models, answer))
            print(f"{group}, temperature {temperature}: {len(chosen)} answers", flush=True)


def _proposals(models: Models, answer: Answer) -> dict[str, Proposals]:
    """At each position whose next DEPTH tokens are known. The answer's first token comes from the prompt's own pass."""
    tokens, last = answer.tokens, len(answer.tokens) - DEPTH - 1
    count = last - answer.prompt
    truth = tokens[answer.prompt + 1 :].unfold(0, DEPTH, 1)[:count]  # (M, K)
    found = {"lookup": _looked_up(tokens.numpy(), answer.prompt, truth)}
    coverages = {
        "eagle": chains.everything,
        "eagle/no-prompt": chains.without_prompt(answer.prompt),
        "eagle/after-hole": chains.after_hole(HOLE),
    }
    for name, visible in coverages.items():
        made = chains.of_head(
            models.head, models.target.embed, tokens, answer.fused, answer.prompt - 1, count, DEPTH, visible
        )
        found[name] = _judged(made, truth)
    text = tokens[:last]
    made = chains.of_model(models.draft, text, answer.prompt, count, DEPTH, chains.everything)
    found["draft"] = _judged(made, truth)
    for name, (sinks, window) in WINDOWS.items():
        visible = chains.sinks_and_window(sinks, window)
        found[name] = _judged(chains.of_model(models.target.model, text, answer.prompt, count, DEPTH, visible), truth)
    return found


def _judged(made: chains.Chains, truth: Tensor) -> Proposals:
    agreed = (made.tokens == truth).int().cumprod(1).sum(1)
    return Proposals(agreed.numpy(), np.full(len(agreed), DEPTH), quantised(made.confidence.numpy()))


def _looked_up(tokens: np.ndarray, prompt: int, truth: Tensor) -> Proposals:
    """vLLM's own function; its confidence is the length of the match, in tokens."""
    depth, proposed = np.zeros(len(truth), int), np.zeros(len(truth), int)
    confidence = np.zeros((len(truth), DEPTH), np.int8)
    for place, expected in enumerate(truth.numpy()):
        text = tokens[: prompt + place + 1].astype(np.int32)
        found = lookup(text, **LOOKUP)
        proposed[place] = len(found)
        depth[place] = int((found == expected[: len(found)]).cumprod().sum())
        confidence[place] = _match_length(text) if len(found) else 0
    return Proposals(depth, proposed, confidence)


def _match_length(text: np.ndarray) -> int:
    return max(
        size
        for size in range(LOOKUP["min_ngram"], LOOKUP["max_ngram"] + 1)
        if len(lookup(text, **(LOOKUP | {"min_ngram": size, "max_ngram": size}))) or size == LOOKUP["min_ngram"]
    )


def _recording(rows: Sequence[Row], groups: Sequence[str]) -> Recording:
    lengths = [len(next(iter(row.proposals.values())).depth) for row in rows]
    names = list(rows[0].proposals)

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
    )


if __name__ == "__main__":
    main()
