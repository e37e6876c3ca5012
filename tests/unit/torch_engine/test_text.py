"""Decoding an answer token by token, whatever bytes its tokens are."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from outrider_runtime.torch_engine.text import CONTEXT_TOKENS, Pieces
from tokenizers import Tokenizer, decoders, models

HALF = "\N{REPLACEMENT CHARACTER}"
WORDS = ["<end>", "a", "\u2581b", *(f"<0x{byte:02X}>" for byte in "\u20ac\u00e9".encode()), "<0xFF>"]
END, A, B, EURO_1, EURO_2, EURO_3, E_1, E_2, NONE = range(len(WORDS))


def tokenizer() -> Tokenizer:
    """Build a tokenizer of words and single bytes, like Llama's."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<end>"])
    return made


def sent(prompt: list[int], answer: list[int]) -> list[str]:
    pieces = Pieces(tokenizer(), prompt)
    return [pieces.step(token) for token in answer]


def test_character_of_several_tokens_is_sent_whole() -> None:
    assert sent([A], [EURO_1, EURO_2, EURO_3, B]) == ["", "", "\u20ac", " b"]
    assert sent([A], [END, A]) == ["", "a"]


def test_invalid_bytes_after_valid_ones_are_replaced() -> None:
    """Bug: the decoder revises the text of adjacent bytes, the stream raised, and the engine stopped."""
    assert sent([A], [E_1, E_2, NONE, A, A]) == ["", "\u00e9", "", f"{HALF}a", "a"]


def test_prompt_ending_inside_character_is_not_repeated() -> None:
    """Bug: the answer began with the last words of the prompt."""
    assert sent([A, B, EURO_1, EURO_2], [EURO_3, A]) == ["\u20ac", "a"]


@given(
    prompt=st.lists(st.integers(0, len(WORDS) - 1), max_size=2 * CONTEXT_TOKENS),
    answer=st.lists(st.integers(0, len(WORDS) - 1), max_size=40),
)
def test_every_word_is_sent_once_among_any_bytes(prompt: list[int], answer: list[int]) -> None:
    text = "".join(sent(prompt, [*answer, A]))
    assert text.endswith("a")
    assert text.count("a") == answer.count(A) + 1
    assert text.count("b") == answer.count(B)
