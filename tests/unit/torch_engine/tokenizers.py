"""Writes a tokenizer of single letters and a chat template into a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.unit.torch_engine.models import VOCABULARY

END = 0
TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}a:"


def write_tokenizer(folder: Path, tokens: int = VOCABULARY) -> None:
    """Write the tokenizer's files. Token 0 ends an answer; the others are letters from '!' on."""
    vocabulary = {"<end>": END, **{chr(32 + number): number for number in range(1, tokens)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
