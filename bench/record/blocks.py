"""What a block head proposes at every position of a text at once. A block sees the states of the text before it."""

from __future__ import annotations

import torch

from bench.record.chains import Chains, greedy
from training.block_head.head import BLOCK, BlockHead
from training.block_head.learning import cut_stretch
from training.target import Answer, Target


@torch.inference_mode()
def propose_with_block_head(head: BlockHead, target: Target, answer: Answer, count: int) -> Chains:
    """Propose after each of the answer's first `count` tokens. The result's tensors are (count, BLOCK)."""
    stretch = cut_stretch(answer, answer.prompt, count, answer.prompt)
    token = stretch.tokens[0, :count]
    states = head(target.embed, token[None], stretch.context, stretch.unseen)[0].to(target.output.dtype)
    proposed, confidence = [], []
    for place in range(BLOCK):
        token, sure = greedy(states[:, place] @ target.output.T + head.markov(token))
        proposed.append(token)
        confidence.append(sure)
    return Chains(torch.stack(proposed, 1), torch.stack(confidence, 1))
