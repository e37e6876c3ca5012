"""An answer's text, token by token, whatever bytes its tokens are."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from outrider_runtime.torch_engine.text import CONTEXT_TOKENS, Pieces
from tokenizers import Tokenizer, decoders, models

HALF = "\N{REPLACEMENT CHARACTER}"
WORDS = ["<end>", "a", "\u2581b", *(f"<0x{byte:02X}>" for byte in "\u20ac\u00e9".encode()), "<0xFF>"]
END, A, B, EURO_1, EURO_2, EURO_3, E_1, E_2, NONE = range(len(WORDS))


def tokenizer() -> Tokenizer:
    """Of words and single bytes, as a Llama's is."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<end>"])
    return made


def told(prompt: list[int], answer: list[int]) -> list[str]:
    pieces = Pieces(tokenizer(), prompt)
    return [pieces.step(token) for token in answer]


def test_a_character_of_several_tokens_goes_out_whole() -> None:
    assert told([A], [EURO_1, EURO_2, EURO_3, B]) == ["", "", "\u20ac", " b"]
    assert told([A], [END, A]) == ["", "a"]


def test_bytes_that_are_no_text_behind_some_that_were_end_no_engine() -> None:
    """Bug: the decoder takes back what it said of bytes that stand together, the stream raised, and every request
    died of it."""
    assert told([A], [E_1, E_2, NONE, A, A]) == ["", "\u00e9", "", f"{HALF}a", "a"]


def test_a_prompt_that_ends_within_a_character_is_not_told_again() -> None:
    """Bug: the answer began with the prompt's last words."""
    assert told([A, B, EURO_1, EURO_2], [EURO_3, A]) == ["\u20ac", "a"]


@given(
    prompt=st.lists(st.integers(0, len(WORDS) - 1), max_size=2 * CONTEXT_TOKENS),
    answer=st.lists(st.integers(0, len(WORDS) - 1), max_size=40),
)
def test_every_word_is_told_once_whatever_bytes_stand_around_it(prompt: list[int], answer: list[int]) -> None:
    text = "".join(told(prompt, [*answer, A]))
    assert text.endswith("a")
    assert text.count("a") == answer.count(A) + 1
    assert text.count("b") == answer.count(B)
