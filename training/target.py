"""The target of a draft: it writes the answers that the draft learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    StaticCache,
)

PROMPT_TOKENS = 512  # a longer prompt is cut
INVENTED_TOKENS = 48
GROUPED = "grouped"


class CannotTrainError(Exception):
    """The request cannot be met; the message says why, and what to do."""


class Answer(NamedTuple):
    """Tokens (T,), of which the first `prompt` are the prompt's, and the states of all but the last.

    fused (T - 1, 3H): the three states that the head reads. final (T - 1, H): the input of the target's output layer.
    """

    tokens: Tensor
    prompt: int
    fused: Tensor
    final: Tensor


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Run SDPA; where each row has one query, treat the heads that share keys as positions.

    SDPA would copy the keys for each of those heads, which takes longer than the rest of a step.

    query (B, heads, Q, D), key and value (B, key heads, T, D), mask (B, 1, Q, T), to (B, Q, heads, D).
    """
    if query.shape[2] > 1:
        out, _ = AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
        return out, None
    rows, heads, _, width = query.shape
    shared = query.reshape(rows, key.shape[1], -1, width)
    mixed = functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=attention_mask, scale=options["scaling"]
    )
    return mixed.reshape(rows, 1, heads, width), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, AttentionMaskInterface()["sdpa"])


class Target:
    """The frozen target, which writes answers and keeps its hidden states."""

    def __init__(self, folder: Path, device: str) -> None:
        self.config = llama_config(folder)
        self.device = device
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.config.dtype, attn_implementation=GROUPED)
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise CannotTrainError(f"--target {folder} cannot be loaded: {error}") from None
        self.model = model.to(device).requires_grad_(False).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = torch.tensor(ends if isinstance(ends, list) else [ends] if ends is not None else [], device=device)
        self.layers = fused_layers(self.config.num_hidden_layers)

    @property
    def embed(self) -> nn.Module:
        table: nn.Module = self.model.get_input_embeddings()
        return table

    @property
    def output(self) -> Tensor:
        """Rows of the output layer (V, H)."""
        rows: Tensor = self.model.get_output_embeddings().weight
        return rows

    def encode(self, prompt: str) -> list[int]:
        """Encode a user's message with the target's chat template, or the plain text if it has none."""
        text, bare = prompt, self.tokenizer.chat_template is None
        if not bare:
            chat = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=bare)["input_ids"]
        return ids[:PROMPT_TOKENS]

    def invent(self, count: int) -> list[str]:
        """Let the target write prompts where a user's message would begin (Magpie: Xu et al. 2024)."""
        if self.tokenizer.chat_template is None or not count:
            return []
        chat = [{"role": "user", "content": "MESSAGE"}]
        start = self.tokenizer.apply_chat_template(chat, tokenize=False).split("MESSAGE")[0]
        ids = self.tokenizer(start, add_special_tokens=False)["input_ids"]
        answers = self.write([ids] * count, INVENTED_TOKENS, 1.0)
        texts = [self.tokenizer.decode(answer.tokens[len(ids) :], skip_special_tokens=True) for answer in answers]
        return [text.strip() for text in texts if text.strip()]

    @torch.inference_mode()
    def write(
        self, prompts: Sequence[list[int]], length: int, temperature: float | Tensor,
        tick: Callable[[], None] = lambda: None,
    ) -> list[Answer]:  # fmt: skip
        """Generate at most `length` tokens for each prompt in one batch. temperature: of all, or (B,); 0 is greedy."""
        ids, mask = pad_left(prompts, self.device)  # (B, P)
        # A cache that grows is copied at each step.
        cache = StaticCache(config=self.config, max_cache_len=ids.shape[1] + length)
        tokens, fused, final = [ids], [], []
        for _ in range(length):
            out = self.model.model(tokens[-1], attention_mask=mask, past_key_values=cache, output_hidden_states=True)
            fused.append(torch.cat([out.hidden_states[layer] for layer in self.layers], -1))
            final.append(out.hidden_states[-1])
            # The last position alone, as a matrix: for a slice the model would copy its output layer for each row.
            tokens.append(sample(out.last_hidden_state[:, -1] @ self.output.T, temperature))
            mask = functional.pad(mask, (0, 1), value=1)
            tick()
            if torch.isin(torch.cat(tokens[1:], 1), self.ends).any(1).all():
                break
        return self._cut(prompts, torch.cat(tokens, 1), torch.cat(fused, 1), torch.cat(final, 1))

    def _cut(self, prompts: Sequence[list[int]], tokens: Tensor, fused: Tensor, final: Tensor) -> list[Answer]:
        """Cut the padding and the tokens after the end off each row."""
        answers, width = [], max(map(len, prompts))
        for row, prompt in enumerate(prompts):
            ended = torch.isin(tokens[row, width:], self.ends).nonzero()
            stop = width + int(ended[0]) + 1 if len(ended) else tokens.shape[1]
            kept, states = slice(width - len(prompt), stop), slice(width - len(prompt), stop - 1)
            answers.append(
                Answer(tokens[row, kept].clone(), len(prompt), fused[row, states].clone(), final[row, states].clone())
            )
        return answers


def llama_config(folder: Path) -> LlamaConfig:
    """Read the target's configuration; raises CannotTrainError if there is none, or it is of another family."""
    if not (folder / "config.json").is_file():
        raise CannotTrainError(f"--target {folder}: no config.json there; name the folder of a Hugging Face model.")
    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "llama":
        raise CannotTrainError(f"--target {folder} is a {config.model_type} model; this trains heads for llama models.")
    if config.num_hidden_layers < 4:
        raise CannotTrainError(f"--target {folder} has {config.num_hidden_layers} layers; three states to fuse need 4.")
    return config


def fused_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs are fused: vLLM's default if it has three different ones."""
    usual = (2, layers // 2, layers - 3)
    return usual if layers >= 7 else (1, layers // 2, layers - 1)


def pad_left(prompts: Sequence[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Pad the prompts on the left; return tokens and mask, (B, longest)."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def sample(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Sample tokens (B, 1) from logits (B, V) by Gumbel noise. temperature: of all, or (B,); 0 is greedy."""
    noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().clamp_min(1e-30).log()
    return (logits + torch.as_tensor(temperature, device=logits.device).view(-1, 1) * noise).argmax(-1, keepdim=True)
