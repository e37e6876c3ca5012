"""Tokens a step of suffix drafters against prompt lookup, each alone and before an EAGLE-3 head.

    .venv/bin/python -m bench.suffix_drafts [--prompts spec_bench.jsonl]

The target answers prompts of three domains, greedily and at temperature 0.7. Its answers are walked without an engine:
a step proposes K tokens and gains those that the answer has, and one more. Before a head a request gets the proposals
of which more tokens are expected to be accepted, by the runtime's own calibration of confidences, which learns during
the walk. Gains have 95% intervals from a paired bootstrap over the answers. Answers are kept in `--answers`.

Scope Service is walked over the second half of each domain's answers, with the first half kept.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from outrider_runtime.control.plans import Forest
from outrider_runtime.drafters.kept_answers import KeptAnswer, KeptAnswers
from outrider_runtime.drafters.longest_match import follow_matches
from outrider_runtime.drafters.suffix import MatchLengths
from outrider_runtime.loop.confidences import Calibrator

from demo.load import PROMPTS

K, LENGTH, BATCH = 4, 96, 8
"""Proposed tokens, tokens of an answer, and requests that run at once."""
LOOKUP, SUFFIX = MatchLengths(2, 4), MatchLengths(1, 16)
KEPT_BYTES = 16 << 20
TEMPERATURES = {"greedy": 0.0, "sampled": 0.7}
NAMES = (
    "Anna Keller",
    "Omar Haddad",
    "Li Wei",
    "Maria Souza",
    "John Okafor",
    "Sofia Rossi",
    "Emil Larsen",
    "Priya Nair",
)
CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Osaka", "Dublin", "Quito", "Tallinn")
GOODS = ("kettle", "desk lamp", "bicycle pump", "headset", "notebook", "tent", "backpack", "coffee grinder")
TASKS = (
    "a list of integers and returns the second largest", "a string and returns its vowels",
    "two sorted lists and merges them", "a dictionary and swaps keys and values", "a matrix and returns its transpose",
    "a list of words and groups anagrams", "an integer and tells whether it is prime", "a CSV line and splits it",
    "a binary tree and returns its height", "a list and removes duplicates", "a date and returns the weekday",
    "a string and compresses runs of letters", "a list of numbers and returns the median", "a URL and splits it",
    "a text and counts each word", "a list of intervals and merges those that overlap", "a number in Roman digits",
    "a nested list and flattens it", "a string and checks its brackets", "a graph and finds a shortest path",
    "a list and returns all pairs with a given sum", "a temperature in Celsius and converts it",
    "a sentence and reverses it", "a file name and returns its extension",
)  # fmt: skip


def domains(spec_bench: Path | None) -> dict[str, list[str]]:
    """24 prompts of each domain, of which chat gets up to 24 more from Spec-Bench."""
    rng = random.Random(1)
    chat = [line.strip() for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]
    if spec_bench is not None:
        rows = [json.loads(line) for line in spec_bench.read_text(encoding="utf-8").splitlines()]
        chat += [row["turns"][0] for row in rows if row["category"] in ("writing", "stem", "humanities", "qa")][:24]
    return {
        "chat": chat,
        "json": [_order(rng) for _ in range(24)],
        "code": [f"Write a Python function that takes {task}. Add a docstring and an example." for task in TASKS],
    }


def _order(rng: random.Random) -> str:
    bought = " and ".join(
        f"{rng.randint(2, 9)} {item}s at {rng.randint(5, 90)} dollars" for item in rng.sample(GOODS, 2)
    )
    return (
        f"Turn the order into JSON with the keys order_id, customer, city and items, a list of objects with product, "
        f"quantity and price. Answer with JSON only.\nOrder A{rng.randint(10000, 99999)}: {rng.choice(NAMES)} of "
        f"{rng.choice(CITIES)} bought {bought}."
    )


class Answer(NamedTuple):
    tokens: NDArray[np.int32]
    prompt: int
    head: NDArray[np.int64]
    """(positions, K): the head's proposals after each token of the answer."""


def write(folder: Path, texts: dict[str, list[str]]) -> None:
    """Let the target answer what `folder` lacks."""
    import torch

    from bench.record import chains
    from setup.drafts import EAGLE
    from setup.model import FOLDER
    from training.eagle3 import checkpoint
    from training.target import Target

    target = Target(FOLDER, "cpu")
    target.model.float()
    head = checkpoint.load(EAGLE, target).float()
    folder.mkdir(parents=True, exist_ok=True)
    for domain, prompts in texts.items():
        for name, temperature in TEMPERATURES.items():
            file, columns = folder / f"{domain}.{name}.npz", dict[str, Any]()
            if file.exists():
                continue
            torch.manual_seed(7)
            with torch.inference_mode():
                written = target.write([target.encode(prompt) for prompt in prompts], LENGTH, temperature)
                for number, row in enumerate(written):
                    count = len(row.tokens) - row.prompt - 1
                    if count > K:
                        made = chains.propose_with_head(
                            head, target.embed, row.tokens, row.fused, row.prompt - 1, count, K, chains.see_everything
                        )
                        columns |= {f"{number}:tokens": row.tokens, f"{number}:head": made.tokens}
                        columns[f"{number}:prompt"] = row.prompt
            np.savez_compressed(file, **columns)
            print(f"{file}: {len(columns) // 3} answers", flush=True)


def load(file: Path) -> list[Answer]:
    with np.load(file) as columns:
        numbers = dict.fromkeys(name.partition(":")[0] for name in columns.files)
        return [
            Answer(columns[f"{n}:tokens"].astype(np.int32), int(columns[f"{n}:prompt"]), columns[f"{n}:head"])
            for n in numbers
        ]


class Proposal(NamedTuple):
    drafter: int
    tokens: NDArray[np.int64]
    confidence: NDArray[np.float64]


def search_answer(answer: Answer, end: int, match: MatchLengths, kept: KeptAnswers | None) -> Proposal:
    text = answer.tokens[None], np.zeros(1, np.int64), np.array([end])
    made = follow_matches(*text, match, K)
    if kept is not None:
        kept.improve(made, *text, np.zeros(1, np.int64))
    count = made.counts[0]
    return Proposal(0, made.tokens[0, :count], made.confidence[0, :count].astype(np.float64))


def follow_head(answer: Answer, end: int) -> Proposal:
    return Proposal(1, answer.head[end - answer.prompt - 1], np.zeros(K))


def keep_answers(answers: Sequence[Answer]) -> KeptAnswers:
    kept = KeptAnswers(KEPT_BYTES, SUFFIX.longest, math.inf)
    kept.update([KeptAnswer(0, answer.tokens[answer.prompt :], 0.0) for answer in answers], now_s=0.0)
    return kept


def walk(
    answers: Sequence[Answer], match: MatchLengths | None, *, head: bool, kept: KeptAnswers | None = None
) -> NDArray[np.float64]:
    """(answers, 3): tokens, steps and proposed tokens of each, BATCH answers at a time."""
    calibrator = Calibrator(2, K)
    made = np.zeros((len(answers), 3))
    for start in range(0, len(answers), BATCH):
        ends = {n: answers[n].prompt + 1 for n in range(start, min(start + BATCH, len(answers)))}
        while ends:
            used = dict[int, tuple[Proposal, int]]()
            for n, end in list(ends.items()):
                proposal = _choose(answers[n], end, match, head, calibrator, kept)
                follows = answers[n].tokens[end : end + len(proposal.tokens)]
                hits = int((proposal.tokens[: len(follows)] == follows).cumprod().sum())
                gained = min(hits + 1, len(answers[n].tokens) - end)
                used[n] = proposal, hits
                made[n] += gained, 1, len(proposal.tokens)
                ends[n] += gained
                if ends[n] >= len(answers[n].tokens):
                    del ends[n]
            _learn(calibrator, list(used.values()))
    return made


def _choose(
    answer: Answer, end: int, match: MatchLengths | None, head: bool, calibrator: Calibrator, kept: KeptAnswers | None
) -> Proposal:
    proposals = [] if match is None else [search_answer(answer, end, match, kept)]
    proposals += [follow_head(answer, end)] if head else []
    return max(proposals, key=lambda made: _expect_tokens(made, calibrator))  # the first of equal ones


def _expect_tokens(made: Proposal, calibrator: Calibrator) -> float:
    depth = np.arange(len(made.tokens))
    return float(calibrator.acceptance(np.full(len(depth), made.drafter), depth, made.confidence).cumprod().sum())


def _learn(calibrator: Calibrator, used: Sequence[tuple[Proposal, int]]) -> None:
    drafter = np.concatenate([np.full(len(made.tokens), made.drafter) for made, _ in used])
    depth = np.concatenate([np.arange(1, len(made.tokens) + 1) for made, _ in used])
    confidence = np.concatenate([made.confidence for made, _ in used])
    tried = np.concatenate([np.arange(len(made.tokens)) <= hits for made, hits in used])
    accepted = np.concatenate([np.arange(len(made.tokens)) < hits for made, hits in used])
    forest = SimpleNamespace(drafter=drafter, depth=depth, confidence=confidence)
    calibrator.observe(cast(Forest, forest), tried, accepted)


def gain(new: NDArray[np.float64], old: NDArray[np.float64]) -> str:
    """Tokens a step, new / old - 1, with a 95% interval over answers."""
    picks = np.random.default_rng(0).integers(0, len(new), (4000, len(new)))

    def rate(made: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(made[picks, 0].sum(1) / made[picks, 1].sum(1))

    low, high = np.quantile(rate(new) / rate(old) - 1, [0.025, 0.975])
    middle = new[:, 0].sum() / new[:, 1].sum() * old[:, 1].sum() / old[:, 0].sum() - 1
    return f"{middle:+.1%} [{low:+.1%}, {high:+.1%}]"


POOLS: dict[str, Callable[[Sequence[Answer]], NDArray[np.float64]]] = {
    "head": lambda answers: walk(answers, None, head=True),
    "lookup": lambda answers: walk(answers, LOOKUP, head=False),
    "suffix": lambda answers: walk(answers, SUFFIX, head=False),
    "lookup, head": lambda answers: walk(answers, LOOKUP, head=True),
    "suffix, head": lambda answers: walk(answers, SUFFIX, head=True),
}
COMPARED = (("suffix", "lookup"), ("suffix, head", "lookup, head"), ("suffix, head", "head"))


def walk_second_half(answers: Sequence[Answer]) -> dict[str, NDArray[np.float64]]:
    """The walks of the second half; Service: with the first half kept."""
    kept, rest = keep_answers(answers[: len(answers) // 2]), answers[len(answers) // 2 :]
    return {
        "head": walk(rest, None, head=True),
        "Request": walk(rest, SUFFIX, head=False),
        "Service": walk(rest, SUFFIX, head=False, kept=kept),
        "Request, head": walk(rest, SUFFIX, head=True),
        "Service, head": walk(rest, SUFFIX, head=True, kept=kept),
    }


SCOPES_COMPARED = (
    ("Service", "Request"), ("Service", "head"), ("Service, head", "Request, head"), ("Service, head", "head")
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="Spec-Bench, for more prompts of chat")
    parser.add_argument("--answers", type=Path, default=Path(".outrider/suffix"), metavar="FOLDER")
    options = parser.parse_args()
    write(options.answers, domains(options.prompts))
    for file in sorted(options.answers.glob("*.npz")):
        answers = load(file)
        print(f"\n{file.stem}: {len(answers)} answers")
        _print_walks({name: pool(answers) for name, pool in POOLS.items()}, COMPARED)
        print(f"  their second half, scope Service: {len(answers) // 2} answers are kept")
        _print_walks(walk_second_half(answers), SCOPES_COMPARED)
    _print_times()
    return 0


def _print_walks(made: dict[str, NDArray[np.float64]], compared: Sequence[tuple[str, str]]) -> None:
    for name, columns in made.items():
        tokens, steps, proposed = columns.sum(0)
        print(f"  {name:14s} {tokens / steps:.3f} tokens a step, {proposed / steps:.2f} proposed")
    for new, old in compared:
        print(f"  [{new}] / [{old}]: {gain(made[new], made[old])}")


def _print_times() -> None:
    """CPU time of a search by 64 requests, for texts in which a few tokens are most of all."""
    rng, rows = np.random.default_rng(0), np.arange(64)
    print()
    for length in (300, 1000, 8000, 32000):
        texts = (rng.zipf(1.2, (64, length)) % 49152).astype(np.int32)
        spans = []
        for _ in range(20):
            began = time.process_time()
            follow_matches(texts, rows, np.full(64, length), SUFFIX, K)
            spans.append((time.process_time() - began) / 64)
        print(f"{length} tokens: {1e6 * float(np.median(spans)):.1f} us a request and step")
    _print_times_of_kept_answers(rng)


def _print_times_of_kept_answers(rng: np.random.Generator) -> None:
    """CPU time of a search in a full memory by 64 requests, for texts like English and for texts of three tokens."""
    for name, answers in (
        ("words", rng.zipf(1.2, (2000, 200)) % 49152),
        ("three tokens", rng.integers(3, size=(2000, 200))),
    ):
        kept, texts, rows = (
            KeptAnswers(KEPT_BYTES, SUFFIX.longest, math.inf),
            answers[-64:].astype(np.int32),
            np.arange(64),
        )
        kept.update([KeptAnswer(0, answer.astype(np.int32), 0.0) for answer in answers[:-64]], now_s=0.0)
        spans = list[float]()
        for length in range(20, 190):
            made = follow_matches(texts, rows, np.full(64, length), SUFFIX, K)
            began = time.process_time()
            kept.improve(made, texts, rows, np.full(64, length), np.zeros(64, np.int64))
            spans.append((time.process_time() - began) / 64)
        print(f"{KEPT_BYTES >> 20} MiB of kept {name}: {1e6 * float(np.median(spans)):.1f} us a request and step more")


if __name__ == "__main__":
    sys.exit(main())
