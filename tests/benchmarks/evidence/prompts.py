"""What the requests ask: Spec-Bench's first turns by category, and the gaps between the Azure trace's requests.

Both come from the shared data beside the checkout. Without it the small sets in `data/` serve, and the run says so:
their prompts are our own, their gaps are drawn with the trace's mean and spread.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SHARED = REPOSITORY.parent / "shared" / "data"
OWN = Path(__file__).parents[1] / "data"
PROMPTS = "spec_bench_even.jsonl"
TRACE = "azure_llm_2023_code.csv"
OWN_NAMES = {PROMPTS: "prompts.jsonl", TRACE: "arrivals.csv"}
SOURCES = {
    PROMPTS: "the even-numbered questions of Spec-Bench (github.com/hemingkx/Spec-Bench, Apache-2.0)",
    TRACE: "AzureLLMInferenceTrace_code.csv of github.com/Azure/AzurePublicDataset (CC-BY-4.0)",
}
LONGEST_PROMPT = 1600
"""Characters, about 400 tokens: a longer one would measure the prompt's processing on two cores, and nothing else."""


class DataError(ValueError):
    """The data has not what a scenario asks for; the message says what and where."""


@dataclass(frozen=True)
class Data:
    """The prompts and the trace of one run."""

    prompts: dict[str, tuple[str, ...]]
    """By category."""
    gaps_s: tuple[float, ...]
    notes: tuple[str, ...]
    """A sentence for each set that stands in for one that is not there."""

    def of(self, categories: Sequence[str]) -> tuple[str, ...]:
        """The prompts of these categories, one of each in turn, so that any beginning is a fair mix."""
        missing = [category for category in categories if category not in self.prompts]
        if missing:
            raise DataError(f"no prompts of the category {missing[0]!r}; there are {', '.join(sorted(self.prompts))}")
        chosen = [self.prompts[category] for category in categories]
        return tuple(one[index] for index in range(max(map(len, chosen))) for one in chosen if index < len(one))


def load_data(shared: Path = SHARED, own: Path = OWN) -> Data:
    """Raises DataError when neither folder has a set."""
    notes: list[str] = []
    prompts = _prompts(_file(PROMPTS, shared, own, notes))
    gaps = _gaps(_file(TRACE, shared, own, notes))
    return Data(prompts, gaps, tuple(notes))


def _file(name: str, shared: Path, own: Path, notes: list[str]) -> Path:
    wanted, instead = shared / name, own / OWN_NAMES[name]
    if wanted.is_file():
        return wanted
    if not instead.is_file():
        raise DataError(f"neither {wanted} nor {instead} is there; it holds {SOURCES[name]}")
    notes.append(f"{wanted} is not there ({SOURCES[name]}); the small set {instead} is used instead")
    return instead


def _prompts(file: Path) -> dict[str, tuple[str, ...]]:
    prompts: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        prompts.setdefault(question["category"], []).append(question["turns"][0][:LONGEST_PROMPT])
    return {category: tuple(texts) for category, texts in prompts.items()}


def _gaps(file: Path) -> tuple[float, ...]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        # Seven digits after the point are one more than Python before 3.12 reads.
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in csv.DictReader(lines)]
    return tuple((later - earlier).total_seconds() for earlier, later in itertools.pairwise(times))
