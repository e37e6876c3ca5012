"""The books of the KV memory, in bytes: who may hold how many tokens. The tensors are `kv`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

FIRST_TOKENS = 64
"""A buffer begins with room for so many, and doubles."""


class Holder(NamedTuple):
    model: int
    """In the order in which the pool was told of them."""
    request: str


class KVPool:
    """A model's KV of a request lies in one buffer. It doubles, and where memory is short for that gets FIRST_TOKENS
    more than it needs: a buffer that grows is copied."""

    def __init__(self, total_bytes: int, bytes_per_token: Iterable[int] = (), longest: int = 1 << 40) -> None:
        self.total_bytes = total_bytes
        self.longest = longest
        """Tokens that a buffer ever needs."""
        self.on_drop: Callable[[Holder], None] = lambda _holder: None
        """Called when a buffer is taken away from a request that still runs."""
        self._bytes_per_token = list(bytes_per_token)
        self._tokens: dict[Holder, int] = {}
        self._used = [0] * len(self._bytes_per_token)
        """Bytes of each model."""

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - sum(self._used)

    @property
    def holders(self) -> Iterable[Holder]:
        return self._tokens.keys()

    def add_model(self, bytes_per_token: int) -> None:
        """The next model's number is its place; the target is the first."""
        self._bytes_per_token.append(bytes_per_token)
        self._used.append(0)

    def tokens(self, holder: Holder) -> int:
        """That its buffer has room for."""
        return self._tokens.get(holder, 0)

    def free_tokens(self, model: int, without: Iterable[int] = ()) -> int:
        """without: models whose KV would go, each once."""
        return (self.free_bytes + sum(self._used[one] for one in without)) // self._bytes_per_token[model]

    @property
    def free_tokens_of_all(self) -> int:
        """Tokens that every model could have KV of."""
        return self.free_bytes // sum(self._bytes_per_token)

    def grow(self, holder: Holder, tokens: int) -> bool:
        """Room for `tokens` in all; False, and nothing changes, where there is no memory for them."""
        has = self.tokens(holder)
        if tokens <= has:
            return True
        doubled = max(FIRST_TOKENS, has)
        while doubled < tokens:
            doubled *= 2
        sizes = (max(tokens, min(size, self.longest)) for size in (doubled, tokens + FIRST_TOKENS, tokens))
        return any(self._take(holder, size) for size in sizes)

    def grow_or_drop(self, holder: Holder, tokens: int) -> bool:
        """A drafter that finds no room gives up what it has of the request: it would be of no use."""
        if self.grow(holder, tokens):
            return True
        self.drop(holder)
        return False

    def release(self, holder: Holder) -> None:
        self._used[holder.model] -= self._tokens.pop(holder, 0) * self._bytes_per_token[holder.model]

    def release_all(self, request: str) -> None:
        """The request has ended, or is preempted."""
        for model in range(len(self._bytes_per_token)):
            self.release(Holder(model, request))

    def drop_one(self, models: Iterable[int]) -> bool:
        """Take a buffer away from the first of `models` that has one; False where none has."""
        for model in models:
            holder = next((one for one in self._tokens if one.model == model), None)
            if holder is not None:
                self.drop(holder)
                return True
        return False

    def drop(self, holder: Holder) -> None:
        """Take its buffer away."""
        self.release(holder)
        self.on_drop(holder)

    def _take(self, holder: Holder, tokens: int) -> bool:
        more = (tokens - self.tokens(holder)) * self._bytes_per_token[holder.model]
        if more > self.free_bytes:
            return False
        self._tokens[holder] = tokens
        self._used[holder.model] += more
        return True
