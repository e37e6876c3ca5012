"""The command line of all training programs: it trains a draft of one kind, or evaluates one."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from training.budget import Budget, Progress, say
from training.eagle3.checkpoint import WEIGHTS
from training.prompts import DEMO_PROMPTS, HELD_OUT, read_prompts, split_prompts
from training.rounds import Draft, Kind, Work, train
from training.target import Answer, CannotTrainError, Target


def argument_parser(kind: Kind[Draft]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m training.{kind.program}",
        description=f"Train a draft for a Llama target on the target's own answers: {kind.name}.",
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
        "--minutes", type=parse_positive(float), help="how long to train (default 60 where no other bound is given)"
    )
    parser.add_argument("--answers", type=parse_positive(int), help="end after this many answers")
    parser.add_argument("--steps", type=parse_positive(int), help="end after this many training steps")
    parser.add_argument("--batch", type=parse_positive(int), default=32, help="answers written at once (default 32)")
    parser.add_argument(
        "--length", type=parse_positive(int), default=256, help="longest answer, in tokens (default 256)"
    )
    parser.add_argument(
        "--draft-vocabulary",
        type=parse_positive(int),
        default=8192,
        help="tokens the head may propose (default 8192; larger is slower)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parse_positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Parse a number above zero."""

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    return parse


def prepare_output(folder: Path) -> None:
    """Make the output folder. Raises CannotTrainError now, not after an hour, if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CannotTrainError(f"--output {folder} cannot be written: {error.strerror}") from None


def train_or_evaluate(options: argparse.Namespace, kind: Kind[Draft]) -> None:
    """Train or evaluate."""
    prompts, held_out = split_prompts(read_prompts(options.prompts or DEMO_PROMPTS))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CannotTrainError("--device cuda: torch finds no GPU here; use --device cpu.")
    if options.output:
        prepare_output(options.output)
    target = Target(options.target, options.device)
    head = load_earlier_head(options, target, kind)
    answers = validation_answers(target, held_out, options)
    if not options.evaluate:
        minutes = options.minutes or (None if options.answers or options.steps else 60.0)
        work = Work(
            kind, [target.encode(prompt) for prompt in prompts], options.prompts is None, answers, options.output,
            options.batch, options.length, options.draft_vocabulary,
        )  # fmt: skip
        head = train(target, work, Progress(Budget(minutes, options.answers, options.steps)), head)
    if head:
        say(f"{options.evaluate or options.output}: {kind.figure(head, target, answers)}")


def load_earlier_head(options: argparse.Namespace, target: Target, kind: Kind[Draft]) -> Draft | None:
    """Load the head to evaluate, or the one that the output already has."""
    if options.evaluate:
        return kind.load(options.evaluate, target)
    if not (options.output / WEIGHTS).exists():
        return None
    say(f"{options.output} holds a head: training goes on from it")
    return kind.load(options.output, target)


def validation_answers(target: Target, prompts: Sequence[str], options: argparse.Namespace) -> list[Answer]:
    """Write greedy answers to held-out prompts: the same for every head of a target, prompt file and seed."""
    torch.manual_seed(options.seed)  # here: a head that was loaded before must not change the answers
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


def exit_with_training(kind: Kind[Draft]) -> NoReturn:
    """Run the program with the shell's arguments; SIGTERM ends a training as Ctrl-C does."""
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(run_main(kind, None))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out. On CPUs torch has no exception for it, so its text is searched."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def run_main(kind: Kind[Draft], argv: Sequence[str] | None) -> int:
    """Train or evaluate a draft of this kind; return the exit status."""
    options = argument_parser(kind).parse_args(argv)
    disable_progress_bar()
    try:
        train_or_evaluate(options, kind)
    except CannotTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sizes = f"--batch {options.batch}, --length {options.length}, --draft-vocabulary {options.draft_vocabulary}"
        print(f"error: out of memory: lower one of {sizes}. {error}", file=sys.stderr)
        return 1
    return 0
