"""Train a block head (DSpark) for a Llama target on the target's own answers (docs/how-to/train-a-draft.md).

    python -m training.block_head --target MODEL --output HEAD    # an hour; minutes on a GPU
    python -m training.block_head --target MODEL --evaluate HEAD  # acceptance of a head that is there

A block is the request's last token and masks after it. One pass over the target's hidden states before the block
proposes the token after each of its tokens (DFlash); a Markov head adds a bias that depends on the token before
(DSpark). A step trains on blocks after 64 successive tokens of each of eight answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.acceptance_figures import format_figure
from training.block_head.checkpoint import load, save
from training.block_head.learning import acceptance, learn, new_head
from training.command_line import exit_with_training, run_main
from training.rounds import Kind

BLOCK_HEAD = Kind(
    "block_head", "block head (DSpark)", new_head, learn,
    lambda head, target, answers: format_figure(acceptance(head, target, answers)), save, load, passes=48,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(BLOCK_HEAD, argv)


if __name__ == "__main__":
    exit_with_training(BLOCK_HEAD)
