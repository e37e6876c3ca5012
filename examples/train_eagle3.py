"""Train an EAGLE-3 head for a Llama target on the target's own answers (docs/how-to/train-a-draft.md).

    python examples/train_eagle3.py --target MODEL --output HEAD                # an hour; minutes on a GPU
    python examples/train_eagle3.py --target MODEL --evaluate HEAD              # acceptance of a head that is there

Rounds: the target answers a batch of prompts and keeps the hidden states that it had meanwhile, then the head takes
a few steps on the answers kept. The head reads, at position p, the fused hidden states of p and the token p + 1, and
proposes the token p + 2; from its second step on it reads its own output instead of the target's ("training-time
test": EAGLE-3, Li et al. 2025, section 3). vLLM 0.32 loads what is written as `{"method": "eagle3"}`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch
from eagle3 import checkpoint
from eagle3.learning import acceptance, collate, learn, new_head
from eagle3.target import Answer, CannotTrainError, Target
from torch import nn
from transformers.utils.logging import disable_progress_bar

DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.txt"
SORTED = 8  # batches of prompts that are drawn to take one of: prompts of like length need little padding
WARM_UP_STEPS, PEAK_RATE = 30, 0.6  # the peak learning rate is PEAK_RATE / hidden size
WINDOW_BYTES = 2 << 30  # of hidden states kept; the oldest answers leave first
HELD_OUT = 32  # prompts that are only validated on
VOCABULARY_TOKENS = 8_000  # of answers seen before the draft vocabulary is chosen
LAST_WRITING = 0.9  # share of the budget after which no more answers are written: the rest of it anneals
VALIDATE_EVERY = 0.1  # share of the budget
PROGRESS_S = 10.0


@dataclass(frozen=True)
class Budget:
    """What training may take; whichever ends first. None: no bound."""

    minutes: float | None = None
    answers: int | None = None
    steps: int | None = None

    def spent(self, minutes: float, answers: float, steps: int) -> float:
        """Share of the budget, 1 at its end."""
        pairs = ((minutes, self.minutes), (answers, self.answers), (steps, self.steps))
        return min(1.0, max(used / bound for used, bound in pairs if bound))


@dataclass
class Progress:
    """What is done, and a line about it every ten seconds. An answer that was written is used up over its passes."""

    budget: Budget
    clock: Callable[[], float] = time.monotonic
    answers: int = 0
    used: float = 0.0
    tokens: int = 0
    steps: int = 0
    loss: float = math.nan
    started_s: float = field(init=False)
    printed_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.printed_s = self.clock()

    def spent(self) -> float:
        return self.budget.spent((self.clock() - self.started_s) / 60, self.used, self.steps)

    def room(self, batch: int) -> int:
        """How many answers to write next."""
        if self.answers and self.spent() >= LAST_WRITING:
            return 0
        return min(batch, self.budget.answers - self.answers) if self.budget.answers else batch

    def knows_vocabulary(self) -> bool:
        """Enough answers, or as many as the budget has room for."""
        return self.tokens >= VOCABULARY_TOKENS or self.spent() > 0.5 or not self.room(1)

    def tick(self) -> None:
        time_s = self.clock()
        if time_s - self.printed_s < PROGRESS_S:
            return
        self.printed_s = time_s
        share = self.spent()
        left = (time_s - self.started_s) * (1 / share - 1) if share else math.inf
        eta = f"{left / 60:.1f} min" if math.isfinite(left) else "unknown"
        say(
            f"{share:4.0%}  answers {self.answers}  tokens {self.tokens}  steps {self.steps}  "
            f"loss {'-' if math.isnan(self.loss) else format(self.loss, '.3f')}  ETA {eta}"
        )


def say(line: str) -> None:
    print(line, flush=True)


Draft = TypeVar("Draft", bound=nn.Module)


@dataclass(frozen=True)
class Kind(Generic[Draft]):
    """What is trained."""

    name: str
    new: Callable[[Target, Sequence[Answer], int], Draft]
    """Makes the training state from answers and a size of the draft vocabulary."""
    learn: Callable[[Target, Draft, torch.optim.Optimizer, Sequence[Answer], float], float]
    """One step at a learning rate; the loss before it."""
    figure: Callable[[Draft, Target, Sequence[Answer]], str]
    """What drafts of this kind are compared by."""
    save: Callable[[Draft, Target, Path], None]
    load: Callable[[Path, Target], Draft]
    passes: int
    """How often an answer is trained on."""
    coolest: float = 1.0
    """Answers are sampled at temperatures from this to 1."""


@dataclass(frozen=True)
class Work(Generic[Draft]):
    """What training reads: token prompts to answer, answers to validate on, sizes, and where the head goes."""

    kind: Kind[Draft]
    prompts: Sequence[list[int]]
    invents: bool
    held_out: Sequence[Answer]
    output: Path
    batch: int
    length: int
    vocabulary: int


def train(target: Target, work: Work[Draft], progress: Progress, head: Draft | None = None) -> Draft | None:
    """Rounds until the budget is spent; Ctrl-C and SIGTERM end it early. The head is written along the way."""
    window: deque[Answer] = deque()
    optimizer, chooser, validated = None, random.Random(torch.initial_seed()), 0.0
    try:
        while progress.spent() < 1:
            if count := progress.room(work.batch):
                write_round(target, work, progress, window, chooser, count)
            if head is None:
                if not progress.knows_vocabulary():
                    continue
                head = work.kind.new(target, window, work.vocabulary)
            optimizer = optimizer or torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
            learn_round(target, work, progress, head, optimizer, window, chooser)
            if progress.spent() - validated >= VALIDATE_EVERY:
                validated = progress.spent()
                say(f"{validated:4.0%}  held out: {work.kind.figure(head, target, work.held_out)}")
                work.kind.save(head, target, work.output)
    except KeyboardInterrupt:
        say("interrupted: writing what there is" if head else "interrupted before there was a head: nothing is written")
    if head:
        work.kind.save(head, target, work.output)
    return head


def write_round(
    target: Target, work: Work[Draft], progress: Progress, window: deque[Answer], chooser: random.Random, count: int
) -> None:
    """One batch of sampled answers into the window; half of the prompts are the target's own where it invents them."""
    invented = [target.encode(text) for text in target.invent(count // 2 if work.invents else 0)]
    prompts = invented + alike(work.prompts, count - len(invented), chooser)
    temperatures = work.kind.coolest + (1 - work.kind.coolest) * torch.rand(len(prompts), device=target.device)
    answers = target.write(prompts, work.length, temperatures, progress.tick)
    answers = [answer for answer in answers if len(answer.tokens) > 2]
    window.extend(answers)
    progress.answers += len(prompts)
    progress.tokens += sum(len(answer.tokens) - answer.prompt for answer in answers)
    while (
        len(window) > work.batch and sum(answer.fused.nbytes + answer.final.nbytes for answer in window) > WINDOW_BYTES
    ):
        window.popleft()


def alike(prompts: Sequence[list[int]], count: int, chooser: random.Random) -> list[list[int]]:
    """`count` prompts of like length, each of all as likely as any other."""
    drawn = sorted(chooser.choices(prompts, k=SORTED * count), key=len)
    start = count * chooser.randrange(SORTED)
    return drawn[start : start + count]


def learn_round(
    target: Target, work: Work[Draft], progress: Progress, head: Draft, optimizer: torch.optim.Optimizer,
    window: Sequence[Answer], chooser: random.Random,
) -> None:  # fmt: skip
    """Small batches drawn from the window, until the answers written are used up, or as many as a round writes."""
    size = max(1, work.batch // 4)
    end = max(progress.answers, progress.used + work.batch)
    while progress.used < end and (share := progress.spent()) < 1:
        rate = PEAK_RATE / target.config.hidden_size * min(1, (progress.steps + 1) / WARM_UP_STEPS) * (1 - share)
        loss = work.kind.learn(target, head, optimizer, chooser.sample(list(window), min(size, len(window))), rate)
        progress.steps += 1
        progress.used += size / work.kind.passes
        progress.loss = loss if math.isnan(progress.loss) else 0.9 * progress.loss + 0.1 * loss
        progress.tick()


def figure(rates: Sequence[float]) -> str:
    """The figure that heads are compared by."""
    tokens = f"{tokens_a_step(rates):.2f} tokens a step at draft length {len(rates)}"
    return f"acceptance per position {by_position(rates)}; {tokens}"


def by_position(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3f}" for rate in rates)


def tokens_a_step(rates: Sequence[float]) -> float:
    """1 + sum of prod(rates[:k + 1]): the target's own token, and each drafted one if all before it were accepted."""
    return 1.0 + sum(math.prod(rates[: position + 1]) for position in range(len(rates)))


def read_prompts(file: Path) -> list[str]:
    """One prompt a line; or a JSON object a line, with the prompt in `turns` (Spec-Bench; its first) or `prompt`."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CannotTrainError(f"--prompts {file} cannot be read: {error}") from None
    prompts = [prompt_of(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line]
    if len(prompts) < 2:
        raise CannotTrainError(f"--prompts {file} has {len(prompts)} prompts; two are the least: one is held out.")
    return prompts


def prompt_of(line: str, place: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        record = json.loads(line)
        prompt = record["turns"][0] if "turns" in record else record["prompt"]
    except (ValueError, LookupError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise CannotTrainError(f"{place}: a JSON line needs the prompt as `turns: [...]` or `prompt`.")
    return prompt


def split(prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Prompts to train on, and at most HELD_OUT spread evenly over the file that are only validated on."""
    stride = max(min(8, len(prompts)), math.ceil(len(prompts) / HELD_OUT))
    held_out = list(prompts[::stride])
    return [prompt for prompt in prompts if prompt not in set(held_out)], held_out


EAGLE3 = Kind(
    "EAGLE-3 head", new_head,
    lambda target, head, optimizer, answers, rate: learn(target, head, optimizer, collate(answers), rate),
    lambda head, target, answers: figure(acceptance(head, target, answers)), checkpoint.save, checkpoint.load, passes=4,
)  # fmt: skip


def arguments(kind: Kind[Draft]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"Train a draft for a Llama target on the target's own answers: {kind.name}."
    )
    parser.add_argument("--target", type=Path, required=True, help="folder of the model to draft for")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="folder for the head; one that holds a head is trained further")
    what.add_argument("--evaluate", type=Path, metavar="HEAD", help="print this head's acceptance, train nothing")
    parser.add_argument(
        "--prompts",
        type=Path,
        help="a prompt a line, or Spec-Bench's JSON lines (default: the demo's, and as many that the target invents)",
    )
    parser.add_argument(
        "--minutes", type=positive(float), help="how long to train (default 60 where no other bound is given)"
    )
    parser.add_argument("--answers", type=positive(int), help="end after this many answers")
    parser.add_argument("--steps", type=positive(int), help="end after this many training steps")
    parser.add_argument("--batch", type=positive(int), default=32, help="answers written at once (default 32)")
    parser.add_argument("--length", type=positive(int), default=256, help="longest answer, in tokens (default 256)")
    parser.add_argument(
        "--draft-vocabulary",
        type=positive(int),
        default=8192,
        help="tokens the head may propose (default 8192; larger is slower)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """A number above zero."""

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    return parse


def prepare(folder: Path) -> None:
    """The output folder, or why nothing can be written there, before an hour is spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CannotTrainError(f"--output {folder} cannot be written: {error.strerror}") from None


def run(options: argparse.Namespace, kind: Kind[Draft]) -> None:
    """Trains or evaluates."""
    prompts, held_out = split(read_prompts(options.prompts or DEMO_PROMPTS))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CannotTrainError("--device cuda: torch finds no GPU here; use --device cpu.")
    if options.output:
        prepare(options.output)
    target = Target(options.target, options.device)
    head = earlier_head(options, target, kind)
    answers = validation(target, held_out, options)
    if not options.evaluate:
        minutes = options.minutes or (None if options.answers or options.steps else 60.0)
        work = Work(
            kind, [target.encode(prompt) for prompt in prompts], options.prompts is None, answers, options.output,
            options.batch, options.length, options.draft_vocabulary,
        )  # fmt: skip
        head = train(target, work, Progress(Budget(minutes, options.answers, options.steps)), head)
    if head:
        say(f"{options.evaluate or options.output}: {kind.figure(head, target, answers)}")


def earlier_head(options: argparse.Namespace, target: Target, kind: Kind[Draft]) -> Draft | None:
    """The head to evaluate, or the one that the output already holds."""
    if options.evaluate:
        return kind.load(options.evaluate, target)
    if not (options.output / checkpoint.WEIGHTS).exists():
        return None
    say(f"{options.output} holds a head: training goes on from it")
    return kind.load(options.output, target)


def validation(target: Target, prompts: Sequence[str], options: argparse.Namespace) -> list[Answer]:
    """Greedy answers to prompts that training never sees: the same for every head of a target, prompt file and seed."""
    torch.manual_seed(options.seed)  # here, not before: whether there is a head already must change nothing
    invented = target.invent(HELD_OUT - len(prompts)) if options.prompts is None else []
    prompts, answers = [*prompts, *invented], list[Answer]()
    for start in range(0, len(prompts), options.batch):
        batch = [target.encode(prompt) for prompt in prompts[start : start + options.batch]]
        answers += [
            answer for answer in target.write(batch, options.length, 0.0) if len(answer.tokens) > answer.prompt + 1
        ]
    tokens = sum(len(answer.tokens) - answer.prompt for answer in answers)
    if not tokens:
        raise CannotTrainError("The target says nothing to the held-out prompts: give it --prompts that it answers.")
    say(f"held out: {len(answers)} answers, {tokens} tokens")
    return answers


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def out_of_memory(error: Exception) -> bool:
    """torch has a type of its own for GPUs alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(EAGLE3, argv)


def run_main(kind: Kind[Draft], argv: Sequence[str] | None) -> int:
    """The exit status of a training script for drafts of this kind."""
    options = arguments(kind).parse_args(argv)
    disable_progress_bar()
    try:
        run(options, kind)
    except CannotTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        sizes = f"--batch {options.batch}, --length {options.length}, --draft-vocabulary {options.draft_vocabulary}"
        print(f"error: out of memory: lower one of {sizes}. {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
