"""A request inside the engine: its tokens, how tokens are drawn for it, and what ends its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider_runtime.torch_engine.tree import Tree


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn. The names and their meaning are those of the OpenAI API and of vLLM."""

    seed: int = 0
    is_seeded: bool = True
    """Whether the user named the seed: then the answer is the same with any drafter; else only its distribution is."""
    temperature: float = 1.0
    """0: the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """Most probable tokens to report with each token of the answer; None: report no log-probabilities."""

    @property
    def uses_rejection(self) -> bool:
        """Whether proposals may be drawn from a drafter's distribution and verified by rejection sampling."""
        return self.temperature > 0 and not self.is_seeded

    @property
    def has_raw_logits(self) -> bool:
        """Whether the model's logits are used as they are, without biases and penalties."""
        return not (
            self.logit_bias or self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class Stops:
    """The conditions that end an answer."""

    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    """The model's own end tokens; empty when the request ignores them."""
    tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    sorted_strings: tuple[str, ...] = field(init=False)
    """The stop strings in order, so that a partial match is found by bisection."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sorted_strings", tuple(sorted(self.strings)))


class Detokenizer(Protocol):
    """Turns an answer into text, token by token."""

    def step(self, token: int, /) -> str:
        """Return the text that this token completes; empty while a character lacks tokens."""


@dataclass(slots=True, eq=False)
class TokenHistory:
    """The counts of a request's tokens that penalties need."""

    distinct: dict[int, None] = field(default_factory=dict)
    """Tokens of prompt and answer; an ordered set."""
    counts: Counter[int] = field(default_factory=Counter)
    """Token -> its occurrences in the answer."""
    counted_tokens: int = 0
    """Tokens of the request that both fields include."""

    def catch_up(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Count the tokens added since the last call. tokens: all of the request, its prompt first."""
        self.distinct.update(dict.fromkeys(tokens[self.counted_tokens :]))
        self.counts.update(tokens[max(self.counted_tokens, prompt_tokens) :])
        self.counted_tokens = len(tokens)


@dataclass(slots=True, eq=False)
class Request:
    """A request, from its arrival to its last token."""

    name: str
    tokens: list[int]
    """Tokens of prompt and answer."""
    prompt_tokens: int
    """Length of the prompt."""
    stops: Stops
    sampling: Sampling
    detokenizer: Detokenizer
    due_at: float = 0.0
    """Seconds, of the engine's clock, at which the request has waited as long as its SLO class tolerates."""
    tpot_s: float = 0.0
    """Target seconds per token of its SLO class. The request with the loosest target is preempted first."""
    computed: int = 0
    """Tokens whose KV the target has."""
    proposals: Tree = field(default_factory=Tree)
    """The drafters' proposals for the tokens that come next."""
    chosen: Sequence[int] = ()
    """Nodes of `proposals` that the next step verifies: in ascending order, each with its parent."""
    text: str = ""
    """The answer's text, up to its last complete character."""
    sent_characters: int = 0
    """Characters of `text` that were sent."""
    was_preempted: bool = False
    history: TokenHistory = field(default_factory=TokenHistory)
    """Brought up to date only when a penalty needs it."""

    @property
    def emitted(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def todo(self) -> int:
        """Known tokens whose KV the target lacks."""
        return len(self.tokens) - self.computed

    @property
    def is_prefilled(self) -> bool:
        """Whether the target has the KV of all known tokens but the last one."""
        return self.todo == 1

    @property
    def decodes(self) -> bool:
        """Whether the next step draws a token of the answer after one that was drawn before."""
        return self.is_prefilled and self.emitted > 0
