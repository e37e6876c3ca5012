"""Acceptance of EAGLE-3 and block heads in the serving engine, on the same prompts (docs/how-to/train-a-draft.md).

    python -m training.compare_heads --target MODEL --prompts FILE HEAD [HEAD ...]

Prints a table in Markdown. Each head gets its own engine: vLLM with Outrider's plugin, pinned to one draft length.
Verified and accepted tokens are counted by position. `--evaluate` of the training programs runs the trainer's own code
instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from outrider_crds.draft_pool import BlockDraft, DrafterSpec, DraftMethod, NeuralDraft
from outrider_crds.model_sources import HostPathSource, ModelRef, ModelSource
from outrider_crds.runtime_config import BootConfig, HotConfig
from outrider_crds.spec import Accelerator, DraftPrefillMode, Engine, SpeculationMode
from outrider_runtime.control.plans import ROOT, Outcome
from outrider_runtime.drafters.draft_configs import typed_config
from outrider_runtime.loop.steps import FinishedStep
from outrider_runtime.model_config import UnreadableConfigError, read_config
from outrider_runtime.paths import Paths
from outrider_runtime.vllm_plugin import launch

from training.acceptance_figures import format_rates, tokens_per_step
from training.command_line import parse_positive
from training.prompts import read_prompts
from training.target import CannotTrainError

PROGRAM = "training.compare_heads"
DRAFTER = "head"
ALONE, RESULT = "--alone", "ACCEPTANCE "
LONGEST_PROMPT = 2000
"""Characters of a prompt; with a longer one, prompt and answer would exceed the engine's 1024 tokens."""
ENGINE_ARGUMENTS = ["--max-model-len=1024", "--max-num-seqs=16", "--max-num-batched-tokens=1024"]


class Work(NamedTuple):
    """Prompts that every head drafts for."""

    prompts: Sequence[str]
    length: int
    """Longest answer, in tokens."""
    draft_tokens: int


def acceptance(outcomes: Iterable[Outcome], draft_tokens: int) -> list[float]:
    """Return accepted / tried at each position, given that those before were accepted; 0 where none was tried."""
    tried, accepted = np.zeros((2, draft_tokens + 1), int)
    for outcome in outcomes:
        forest, kept = outcome.forest, outcome.accepted
        reached = (forest.parent == ROOT) | kept[forest.parent]
        tried += np.bincount(forest.depth[outcome.verified & reached], minlength=draft_tokens + 1)
        accepted += np.bincount(forest.depth[kept], minlength=draft_tokens + 1)
    rates: list[float] = (accepted / np.maximum(tried, 1))[1:].tolist()
    return rates


def measure(target: Path, head: Path, work: Work) -> list[float]:
    """Measure the acceptance per position of `head`, in a new process, whose memory is given back."""
    plan = launch_plan(target, head, work.draft_tokens)
    if not plan.pool.neural:
        raise CannotTrainError(f"{head} cannot be served: {plan.pool.dropped[DRAFTER]}")
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    launch.prepare(plan, environment)
    command = [sys.executable, "-m", PROGRAM, ALONE]
    ended = subprocess.run(
        command, env=environment, input=json.dumps(work), stdout=subprocess.PIPE, text=True, check=False
    )
    results = [line.removeprefix(RESULT) for line in ended.stdout.splitlines() if line.startswith(RESULT)]
    if ended.returncode or not results:
        raise CannotTrainError(f"{head}: the engine failed; its error is above.")
    rates: list[float] = json.loads(results[0])
    return rates


def run_alone(work: Work) -> list[float]:
    """Measure the acceptance per position in this process, with the plan that `measure` prepared."""
    from outrider_runtime.profiler.engines.vllm_engine import start_engine
    from vllm import SamplingParams

    engine = start_engine(launch.load_plan())
    loop = engine.engine_core.engine_core.scheduler.outrider
    loop.pin(work.draft_tokens, DRAFTER)
    steps: list[FinishedStep] = []
    loop.listeners.append(steps.append)
    greedy = SamplingParams(temperature=0.0, max_tokens=work.length)
    for number, prompt in enumerate(work.prompts):
        engine.add_request(str(number), encode(engine, prompt), greedy)
    while engine.has_unfinished_requests():
        engine.step()
    return acceptance((step.outcome for step in steps), work.draft_tokens)


def encode(engine: Any, prompt: str) -> dict[str, list[int]]:
    """Encode a user's message with the target's chat template."""
    tokenizer = engine.get_tokenizer()
    text, bare = prompt, tokenizer.chat_template is None
    if not bare:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return {"prompt_token_ids": tokenizer(text, add_special_tokens=bare)["input_ids"]}


def launch_plan(target: Path, head: Path, draft_tokens: int) -> launch.LaunchPlan:
    boot = BootConfig(
        service="heads",
        namespace="default",
        revision="local",
        target=folder_reference(target),
        draft_pool=[read_drafter(head)],
        accelerator=Accelerator(products=["cpu"]),
        engine=Engine(extra_args=[*ENGINE_ARGUMENTS, "--enforce-eager"]),
        max_draft_tokens=draft_tokens,
    )
    hot = HotConfig(
        mode=SpeculationMode.CLOSED_LOOP, draft_prefill=DraftPrefillMode.AUTO, max_draft_tokens=draft_tokens
    )
    return launch.plan_launch(boot, hot, Paths(mounted=False, run_dir=tempfile.mkdtemp(prefix="outrider-")))


def block_kind(head: Path) -> str:
    """Return DFlash, DFlash2 or DSpark; empty for other heads, and for a folder without a config."""
    try:
        return typed_config(read_config(head), str(head)).block_kind
    except UnreadableConfigError:
        return ""


def read_drafter(head: Path) -> DrafterSpec:
    """Return the drafter that the folder's config describes; the pool refuses a folder without a config later."""
    if block_kind(head):
        return DrafterSpec(name=DRAFTER, method=DraftMethod.BLOCK, block=BlockDraft(model=folder_reference(head)))
    return DrafterSpec(name=DRAFTER, method=DraftMethod.EAGLE, eagle=NeuralDraft(model=folder_reference(head)))


def table_head(draft_tokens: int) -> str:
    columns = "head", "kind", "acceptance per position", f"tokens a step at draft length {draft_tokens}"
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def table_row(head: Path, rates: Sequence[float]) -> str:
    return f"| {head} | {block_kind(head) or 'EAGLE-3'} | {format_rates(rates)} | {tokens_per_step(rates):.2f} |"


def folder_reference(folder: Path) -> ModelRef:
    return ModelRef(name=folder.name, source=ModelSource(host_path=HostPathSource(path=str(folder.resolve()))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the model that the heads draft for")
    parser.add_argument("--prompts", type=Path, required=True, help="a prompt a line, or Spec-Bench's JSON lines")
    parser.add_argument(
        "--count", type=parse_positive(int), default=24, help="prompts, spread over the file (default 24)"
    )
    parser.add_argument("--length", type=parse_positive(int), default=64, help="longest answer, in tokens (default 64)")
    parser.add_argument("--draft-tokens", type=parse_positive(int), default=4, help="draft length (default 4)")
    parser.add_argument("heads", type=Path, nargs="+", metavar="HEAD")
    options = parser.parse_args(argv)
    try:
        prompts = [prompt for prompt in read_prompts(options.prompts) if len(prompt) <= LONGEST_PROMPT]
        chosen = prompts[:: max(1, len(prompts) // options.count)][: options.count]
        work = Work(chosen, options.length, options.draft_tokens)
        rows = (table_row(head, measure(options.target, head, work)) for head in options.heads)
        for line in itertools.chain([table_head(options.draft_tokens)], rows):
            print(line, flush=True)
    except CannotTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == [ALONE]:
        print(RESULT + json.dumps(run_alone(Work(*json.load(sys.stdin)))), flush=True)
        os._exit(0)  # vLLM's own teardown takes seconds and has nothing to save
    sys.exit(main())
