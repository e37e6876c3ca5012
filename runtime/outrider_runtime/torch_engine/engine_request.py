"""A request as the engine holds it: its tokens, how its tokens are drawn, and what ends it."""

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
    """The seed is the user's: it gives the same answer whoever drafts. Otherwise only the distribution is promised."""
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
    """Most probable tokens that are told with each token of the answer; None: nothing is told."""

    @property
    def is_free(self) -> bool:
        """Proposals may be drawn from a drafter's distribution."""
        return self.temperature > 0 and not self.is_seeded

    @property
    def is_plain(self) -> bool:
        """Logits are taken as the model gives them."""
        return not (
            self.logit_bias or self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends an answer."""

    max_tokens: int
    end_tokens: frozenset[int] = frozenset()
    """The model's own; empty where the request ignores them."""
    tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    sorted_strings: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sorted_strings", tuple(sorted(self.strings)))


class Detokenizer(Protocol):
    """Turns an answer into text, token by token."""

    def step(self, token: int, /) -> str:
        """The text that is whole with this token; a character may take several."""


@dataclass(slots=True, eq=False)
class TokenHistory:
    """A request's tokens as penalties look at them."""

    distinct: dict[int, None] = field(default_factory=dict)
    """Of prompt and answer."""
    counts: Counter[int] = field(default_factory=Counter)
    """Of the answer."""
    tokens: int = 0
    """That are counted."""

    def catch_up(self, tokens: Sequence[int], prompt: int) -> None:
        """tokens: all of the request's, of which the first `prompt` are its prompt's."""
        self.distinct.update(dict.fromkeys(tokens[self.tokens :]))
        self.counts.update(tokens[max(self.tokens, prompt) :])
        self.tokens = len(tokens)


@dataclass(slots=True, eq=False)
class Request:
    """A request, from its arrival to its last token."""

    name: str
    tokens: list[int]
    """Prompt and answer."""
    prompt: int
    """Tokens of the prompt."""
    stops: Stops
    sampling: Sampling
    detokenizer: Detokenizer
    due_at: float = 0.0
    """When a request that waits has waited as long as its SLO class bears."""
    looseness: float = 0.0
    """Who is preempted first: a class that bears slower tokens."""
    computed: int = 0
    """Tokens whose KV the target has."""
    proposals: Tree = field(default_factory=Tree)
    """What drafters say comes next."""
    chosen: Sequence[int] = ()
    """Nodes of `proposals` that the next step verifies, in their order and each with its parent."""
    text: str = ""
    """Of the answer, as far as it is whole."""
    told: int = 0
    """Characters of `text` that went out."""
    was_preempted: bool = False
    history: TokenHistory = field(default_factory=TokenHistory)
    """As far as a penalty has asked for it."""

    @property
    def emitted(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt

    @property
    def todo(self) -> int:
        """Known tokens that the target has not computed."""
        return len(self.tokens) - self.computed

    @property
    def is_read(self) -> bool:
        """All of them but the last one."""
        return self.todo == 1

    @property
    def decodes(self) -> bool:
        return self.is_read and self.emitted > 0
