"""Greedy answers of the bundled engine under teacher forcing: every token against the logits of the model in float64.

    python -m tests.benchmarks.teacher_forcing [--prompts 200] [--tokens 128]

SmolLM2-135M in float32, every drafter, chains and trees. For each it prints by how much the logit of a token falls
short of the best one at its place at most, and the share of tokens that are the best; it fails where that is over 1e-4,
or under 99.99%. The whole takes an hour of a core; tests/unit/torch_engine does the same on tiny models.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from outrider_runtime.paths import Paths
from outrider_runtime.torch_engine.launch import Loaded, load
from outrider_runtime.torch_engine.requests import Request, Sampling, Stops
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.benchmarks.real_cores import prompts
from tests.engine import engines

WORST_GAP, LEAST_BEST = 1e-4, 0.9999
DEPTH, WIDTH, AT_ONCE = 4, 4, 16
DRAFTERS = (engines.lookup(), engines.draft_model(engines.POOR_DRAFT), engines.eagle())
ARMS = [(DRAFTERS[0].name, 1), *((one.name, width) for one in DRAFTERS[1:] for width in (1, WIDTH))]
"""Drafter and width; a lookup has chains alone."""


def gaps(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """(tokens,): what each token's logit lacks of the best one, the tokens before it given. model: in float64."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.amax(-1) - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]


def started(tokens: int) -> Loaded:
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
    for one in requests:
        loaded.engine.add(one, time.time())
    while loaded.engine.has_work:
        loaded.engine.step()
    return [tuple(one.answer) for one in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    loaded = started(options.tokens)
    texts = [loaded.text.encode(text) for text in prompts(options.prompts)]
    model = AutoModelForCausalLM.from_pretrained(engines.TARGET, dtype=torch.float64).eval()
    known: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    failed = False
    for name, width in ARMS:
        loaded.loop.pin(DEPTH, name, width)
        before = loaded.loop.state().drafters[name].accepted
        found = list(enumerate(answers(loaded, texts, options.tokens)))
        known |= {one: gaps(model, texts[one[0]], one[1]) for one in found if one not in known}
        made = torch.cat([known[one] for one in found])
        worst, best = float(made.max()), float((made == 0).double().mean())
        failed |= worst > WORST_GAP or best < LEAST_BEST
        accepted = loaded.loop.state().drafters[name].accepted - before
        print(
            f"{name}, width {width}: {accepted} proposals accepted; {len(made)} tokens, worst {worst:.2e}, "
            f"{best:.4%} the best", flush=True,
        )  # fmt: skip
    sys.exit(failed)


if __name__ == "__main__":
    main()
