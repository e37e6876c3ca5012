"""Train Medusa heads for a Llama target on the target's own answers (docs/how-to/train-a-draft.md).

    python -m training.medusa --target MODEL --output HEADS     # an hour; minutes on a GPU
    python -m training.medusa --target MODEL --evaluate HEADS   # the figures of heads that are there

Head k, from 1, reads the target's last state at position p and proposes the token p + 1 + k without the tokens between.
It learns the target's distribution there (Medusa-1: Cai et al. 2024, section 3.2, with soft labels).
"""

from __future__ import annotations

from collections.abc import Sequence

from training.command_line import exit_with_training, run_main
from training.medusa.checkpoint import load, save
from training.medusa.heads import Heads
from training.medusa.learning import figures, learn, new_heads
from training.rounds import Kind
from training.target import Answer, Target

NODES = 16


def figure(heads: Heads, target: Target, answers: Sequence[Answer]) -> str:
    """Return the line that heads are compared by."""
    depths, gained = figures(heads, target, answers, NODES)
    first, among = (", ".join(f"{depth[place]:.3f}" for depth in depths) for place in (0, 1))
    return f"at rank 1 {first}; in the first four {among}; {gained:.2f} tokens a step with trees of {NODES} nodes"


MEDUSA = Kind("medusa", "Medusa heads", new_heads, learn, figure, save, load, passes=48, coolest=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(MEDUSA, argv)


if __name__ == "__main__":
    exit_with_training(MEDUSA)
