"""A block head of `training.block_head` is served as published, and proposes what training judges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.record.blocks import propose_with_block_head
from tests.engine.engines import SMALL, block
from tests.engine.ordered import ordered
from tests.engine.test_block_drafts import PROMPTS, alone
from training.block_head.checkpoint import load, save
from training.block_head.head import BLOCK, BlockHead
from training.block_head.learning import new_head
from training.target import Answer, Target

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]
ALIKE = 0.97
"""Share of blocks; random weights leave a few tokens with a logit as good as another's."""


@pytest.fixture(scope="module")
def target() -> Target:
    small = Target(SMALL, "cpu")
    small.model.float()
    return small


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new head, with a Markov head that says something; its proposals depend on all that it reads."""
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("head")
    answers = target.write([target.encode(prompt) for prompt in PROMPTS[:3]], 16, 1.0)
    head = new_head(target, answers, 1024)
    torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    save(head, target, made)
    return made


@torch.inference_mode()
def judged(head: BlockHead, target: Target, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Proposals behind each token of an answer but its last, (M, BLOCK)."""
    out = target.model(tokens[None, :-1], output_hidden_states=True)
    fused = torch.cat([out.hidden_states[layer][0] for layer in target.layers], -1)
    answer = Answer(tokens, prompt, fused, out.hidden_states[-1][0])
    return propose_with_block_head(head, target, answer, len(tokens) - 1 - prompt).tokens


def test_served_head_proposes_what_training_judges(target: Target, folder: Path) -> None:
    """Layers, places, rotary angles, biases and the Markov head are vLLM's own, and none of them fails aloud."""
    head, alike = load(folder, target).float(), list[bool]()
    with ordered([block(folder)], target=SMALL) as engine:
        assert not engine.failures
        answers = engine.run(PROMPTS, alone(0))
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
            read = target.tokenizer(prompt)["input_ids"]
            assert len(read) == engine.prompt_tokens[number]
            expected = judged(head, target, torch.tensor([*read, *answer]), len(read)).tolist()
            for (_, name, known), proposed in engine.scheduler.proposals.items():
                if name == str(number) and known - 1 - len(read) < len(expected):
                    assert 0 < len(proposed) <= BLOCK
                    alike.append(proposed == expected[known - 1 - len(read)][: len(proposed)])
    assert len(alike) > 20
    assert sum(alike) >= ALIKE * len(alike)
