"""A tiny random target, its prompts, and a short training on both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.budget import Budget, Progress
from training.rounds import Draft, Kind, Work, train
from training.target import Answer, Target

VOCABULARY, DRAFTED = 200, 64


def tiny_target(folder: Path) -> Path:
    """Random weights, large enough that its greedy answers follow from its states and not from rounding."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1, eos_token_id=0, bos_token_id=1,
        dtype=torch.float32,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 4  # a target that is sure of what it says
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w2", eos_token="w0").save_pretrained(folder)
    return folder


def prompts(first: int, count: int) -> list[list[int]]:
    return [[2 + (first + 7 * number) % 190, 3 + (first + 11 * number) % 190] for number in range(count)]


def work(kind: Kind[Draft], held_out: list[Answer], folder: Path) -> Work[Draft]:
    """A training of `kind` that writes into `folder`."""
    return Work(kind, prompts(90, 64), False, held_out, folder, batch=32, length=24, vocabulary=DRAFTED)


def train_briefly(target: Target, briefly: Work[Draft], steps: int, head: Draft | None = None) -> Path:
    """Train for so many steps, and return the folder of the head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.budget.VOCABULARY_TOKENS", 1000)
        train(target, briefly, Progress(Budget(steps=steps)), head)
    return briefly.output
