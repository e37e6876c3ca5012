"""Train a block head (DSpark) for a Llama target on the target's own answers (docs/how-to/train-a-draft.md).

    python examples/train_block_head.py --target MODEL --output HEAD                # an hour; minutes on a GPU
    python examples/train_block_head.py --target MODEL --evaluate HEAD              # acceptance of a head that is there

The rounds are those of `train_eagle3`. A block is the request's last token and masks behind it; one pass over the
target's hidden states before it proposes the token after each (DFlash), and a Markov head adds what the token before
says of it (DSpark). A step trains on blocks behind 64 successive tokens of each of eight answers.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from block_head.checkpoint import load, save
from block_head.learning import acceptance, learn, new_head
from train_eagle3 import Kind, figure, run_main, stop

BLOCK_HEAD = Kind(
    "block head (DSpark)", new_head, learn,
    lambda head, target, answers: figure(acceptance(head, target, answers)), save, load, passes=48,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(BLOCK_HEAD, argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
