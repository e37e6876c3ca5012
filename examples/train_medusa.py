"""Train Medusa heads for a Llama target on the target's own answers (docs/how-to/train-a-draft.md).

    python examples/train_medusa.py --target MODEL --output HEADS               # an hour; minutes on a GPU
    python examples/train_medusa.py --target MODEL --evaluate HEADS             # the figures of heads that are there

The rounds are those of `train_eagle3`. Head k, from 1, reads the target's last state at position p and proposes the
token p + 1 + k, without knowing those between: what it learns is the target's own distribution there (Medusa-1: Cai et
al. 2024, section 3.2, with soft labels).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from eagle3.target import Answer, Target
from medusa.checkpoint import load, save
from medusa.heads import Heads
from medusa.learning import figures, learn, new_heads
from train_eagle3 import Kind, run_main, stop

NODES = 16


def figure(heads: Heads, target: Target, answers: Sequence[Answer]) -> str:
    """The figure that heads are compared by."""
    depths, gained = figures(heads, target, answers, NODES)
    first, among = (", ".join(f"{depth[place]:.3f}" for depth in depths) for place in (0, 1))
    return f"at rank 1 {first}; in the first four {among}; {gained:.2f} tokens a step with trees of {NODES} nodes"


MEDUSA = Kind("Medusa heads", new_heads, learn, figure, save, load, passes=48, coolest=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(MEDUSA, argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
