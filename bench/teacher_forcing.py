"""Greedy answers of the bundled engine under teacher forcing: every token against the logits of the model in float64.

    python -m bench.teacher_forcing [--prompts 200] [--tokens 128] [--drafters NAME ...] [--widths 1 4]

writes results/teacher_forcing.json. SmolLM2-135M in float32, every drafter, chains and trees. For each it gives the
largest gap between the best logit and that of the answer's token, and the share of tokens that have the best logit. It
fails above a gap of 1e-4, or below a share of 99.99%. The trees alone take 70 minutes of a core. Results are written at
once; an earlier run's results for other drafters are kept if it had as many prompts and tokens. tests/unit/torch_engine
does the same on tiny models.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from outrider_runtime.paths import Paths
from outrider_runtime.torch_engine.engine_loading import Loaded, load
from outrider_runtime.torch_engine.engine_request import Request, Sampling, Stops
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.real_cores import prompts
from tests.engine import engines

RESULTS = Path(__file__).parent / "results" / "teacher_forcing.json"
WORST_GAP, LEAST_BEST = 1e-4, 0.9999
DEPTH, WIDTH, AT_ONCE = 4, 4, 16
DRAFTERS = (engines.lookup(), engines.draft_model(engines.POOR_DRAFT), engines.eagle())
ARMS = [(DRAFTERS[0].name, 1), *((drafter.name, width) for drafter in DRAFTERS[1:] for width in (1, WIDTH))]
"""Drafter and width; a lookup has chains alone."""


def gaps(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return (tokens,): best logit - logit of the answer's token, given the tokens before it. model: in float64."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.amax(-1) - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]


def load_engine(tokens: int) -> Loaded:
    boot = engines.boot_config(DRAFTERS, max_draft_tokens=DEPTH)
    options = [f"--max-num-seqs={AT_ONCE}", "--kv-cache-memory-bytes=2147483648"]
    settings = boot.engine.model_copy(update={"extra_args": options, "max_model_len": 128 + tokens})
    places = dict.fromkeys(("hot_file", "profiles_dir", "podinfo_dir", "run_dir"), tempfile.mkdtemp())
    hot = engines.hot_config(max_draft_tokens=DEPTH)
    return load(boot.model_copy(update={"engine": settings}), hot, Paths(mounted=False, **places))


def answers(loaded: Loaded, texts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
    requests = [
        Request(f"{time.monotonic()} {number}", list(text), len(text), Stops(tokens), Sampling(temperature=0.0),
                loaded.text.detokenizer(text))
        for number, text in enumerate(texts)
    ]  # fmt: skip
    for pending in requests:
        loaded.engine.add(pending, time.time())
    while loaded.engine.has_work:
        loaded.engine.step()
    return [tuple(request.tokens[request.prompt_tokens :]) for request in requests]


class Arm(NamedTuple):
    """Results of one drafter at one width."""

    drafter: str
    width: int
    accepted: int
    """Accepted proposals."""
    tokens: int
    worst_gap: float
    best_share: float

    @property
    def holds(self) -> bool:
        return self.worst_gap <= WORST_GAP and self.best_share >= LEAST_BEST

    def __str__(self) -> str:
        return (
            f"{self.drafter}, width {self.width}: {self.accepted} proposals accepted; {self.tokens} tokens, "
            f"worst {self.worst_gap:.2e}, {self.best_share:.4%} the best"
        )


class Reference:
    """The model in float64; an answer that several drafters give is evaluated once."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._model = AutoModelForCausalLM.from_pretrained(engines.TARGET, dtype=torch.float64).eval()
        self._known: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def __call__(self, number: int, answer: tuple[int, ...]) -> torch.Tensor:
        """Return the gaps of an answer, see `gaps`. number: of the text."""
        if (number, answer) not in self._known:
            self._known[number, answer] = gaps(self._model, self._texts[number], answer)
        return self._known[number, answer]


def measure(
    loaded: Loaded, reference: Reference, texts: Sequence[Sequence[int]], tokens: int, drafter: str, width: int
) -> Arm:
    loaded.loop.pin(DEPTH, drafter, width)
    before = loaded.loop.state().drafters[drafter].accepted
    made = torch.cat([reference(number, answer) for number, answer in enumerate(answers(loaded, texts, tokens))])
    accepted = loaded.loop.state().drafters[drafter].accepted - before
    return Arm(drafter, width, accepted, len(made), float(made.max()), float((made == 0).double().mean()))


def write(arm: Arm, prompts: int, tokens: int) -> None:
    """Write the results; keep stored results of other arms with the same number of prompts and tokens."""
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    sizes = {"prompts": prompts, "tokens_each": tokens}
    others = document.get("arms", []) if {name: document.get(name) for name in sizes} == sizes else []
    others = [other for other in others if (other["drafter"], other["width"]) != (arm.drafter, arm.width)]
    RESULTS.write_text(json.dumps({**sizes, "arms": [*others, arm._asdict()]}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    names = [drafter.name for drafter in DRAFTERS]
    parser.add_argument("--drafters", nargs="+", choices=names, default=names)
    parser.add_argument("--widths", nargs="+", type=int, choices=(1, WIDTH), default=(1, WIDTH))
    options = parser.parse_args()
    loaded = load_engine(options.tokens)
    texts = [loaded.text.encode(text) for text in prompts(options.prompts)]
    reference, holds = Reference(texts), True
    for drafter, width in ARMS:
        if drafter in options.drafters and width in options.widths:
            arm = measure(loaded, reference, texts, options.tokens, drafter, width)
            write(arm, options.prompts, options.tokens)
            print(arm, flush=True)
            holds &= arm.holds
    sys.exit(not holds)


if __name__ == "__main__":
    main()
