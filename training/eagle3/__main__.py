"""Train an EAGLE-3 head for a Llama target on the target's own answers (docs/how-to/train-a-draft.md).

    python -m training.eagle3 --target MODEL --output HEAD      # an hour; minutes on a GPU
    python -m training.eagle3 --target MODEL --evaluate HEAD    # acceptance of a head that is there

The head reads, at position p, the fused hidden states of p and the token p + 1, and proposes the token p + 2. From its
second step on it reads its own output instead of the target's ("training-time test": EAGLE-3, Li et al. 2025, section
3). vLLM 0.32 loads what is written as `{"method": "eagle3"}`.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.acceptance_figures import format_figure
from training.command_line import exit_with_training, run_main
from training.eagle3.checkpoint import load, save
from training.eagle3.learning import acceptance, collate, learn, new_head
from training.rounds import Kind

EAGLE3 = Kind(
    "eagle3", "EAGLE-3 head", new_head,
    lambda target, head, optimizer, answers, rate: learn(target, head, optimizer, collate(answers), rate),
    lambda head, target, answers: format_figure(acceptance(head, target, answers)), save, load, passes=4,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(EAGLE3, argv)


if __name__ == "__main__":
    exit_with_training(EAGLE3)
